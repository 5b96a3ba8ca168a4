"""Stopping on notice, in one process and with real ranks: what is saved, what is said, what is put back."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import resilient
from resilient.catalog.requests import ask
from resilient.clock import SYSTEM_CLOCK
from resilient.config import Settings
from resilient.elastic.node import Asked, Node
from resilient.engine.peers import Peers, _OwnMemory
from resilient.errors import ErrorKind, PeerError
from resilient.events import Bus, Event, Notice, SaveCommitted
from resilient.run.failures import is_secondary
from resilient.run.grace import Grace, GraceCheck
from resilient.run.session import Run
from resilient.store.local import LocalStore
from resilient.store.memory import MemoryStore
from tests.detect.clouds import FakeCloud
from tests.lives import Life

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if a shell runs the tests in the background
    before = [signal.getsignal(number) for number in NUMBERS]
    iterating = DataLoader.__iter__
    yield
    assert [signal.getsignal(number) for number in NUMBERS] == before
    assert DataLoader.__iter__ is iterating


def train(place: object, *, at: int, send: object, total: int = 10**5, **settings: object) -> tuple[int, int]:
    """Train; call ``send`` within the turn after step ``at``; return where it began, and where it was stopped."""
    seen: list[int] = []

    @resilient.train(place, every=10**6, **settings)  # type: ignore[arg-type]  # passed on
    def main(run: Run) -> None:
        state = {"sum": torch.zeros(1, dtype=torch.float64)}
        run.track(state=state)
        assert state["sum"].item() == run.step
        seen.append(run.step)
        for _ in run.steps(range(10**6), total=total):
            state["sum"] += 1
            if run.step == at:
                send()  # type: ignore[operator]  # a callable without arguments
            time.sleep(0.005)
            seen.append(run.step + 1)

    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 75
    return seen[0], seen[-1]


def kill_self(number: int) -> object:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.field_report("BR-170")
def test_a_signal_saves_the_step_that_goes_on_and_ends_with_the_code_to_start_again(
    number: signal.Signals, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "resilient")
    begun, stopped = train(tmp_path, at=20, send=kill_self(number))
    assert begun == 0
    assert stopped >= 21
    assert [found.step for found in resilient.checkpoints(tmp_path)] == [stopped]
    assert caplog.messages[-1] == f"stopped at step {stopped} by {number.name}: saved; start it again to go on"
    again, _ = train(tmp_path, at=stopped + 3, send=kill_self(number))
    assert again == stopped


def test_the_handler_of_the_program_is_called_too_and_put_back(tmp_path: Path) -> None:
    heard: list[int] = []
    theirs = lambda number, frame: heard.append(number)
    before = signal.signal(signal.SIGTERM, theirs)
    try:
        train(tmp_path, at=3, send=kill_self(signal.SIGTERM))
        assert heard == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    @resilient.train(tmp_path, every=10**6)
    def main(run: Run) -> None:
        run.track(state={"w": torch.zeros(1)})
        for _ in run.steps(range(10)):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        main()


def test_what_a_user_asks_through_the_store_a_file_or_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "resilient")
    place, file, node = tmp_path / "run", tmp_path / "stop", tmp_path / "node"
    node.mkdir()
    store = LocalStore(place)
    train(place, at=2, send=lambda: ask(store, "stop", why="maintenance", clock=SYSTEM_CLOCK))
    assert "by a request to stop (maintenance): saved" in caplog.messages[-1]
    # It was asked of that launch: the next one, which has another id, goes on until it is asked itself.
    threading.Timer(4.0, file.touch).start()
    begun, stopped = train(place, at=-1, send=lambda: None, stop_file=str(file))
    assert stopped > begun + 100
    assert f"by the file {file}: saved" in caplog.messages[-1]
    monkeypatch.setenv("RESILIENT_NODE_DIR", str(node))
    train(place, at=stopped + 2, send=lambda: Node(node).ask(Asked(kind="stop", why="a node is drained")))
    assert "by a node is drained: saved" in caplog.messages[-1]


def test_a_notice_that_is_withdrawn_in_time_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "resilient")
    with FakeCloud() as cloud:
        cloud.preempt("azure", within_s=300)
        threading.Timer(4.0, cloud.withdraw).start()
        threading.Timer(8.0, lambda: cloud.preempt("azure", within_s=5)).start()
        started_s = time.monotonic()
        train(tmp_path, at=-1, send=lambda: None, notices="azure", notices_url=cloud.url)
        assert time.monotonic() - started_s > 8
    assert any("Azure preempts this machine, in" in told and "goes on for now" in told for told in caplog.messages)
    assert "by Azure preempts this machine: saved" in caplog.messages[-1]


def test_a_stop_while_the_step_is_being_saved_uses_that_save(tmp_path: Path) -> None:
    @resilient.train(tmp_path, every=1, keep=resilient.Keep(last=100))
    def main(run: Run) -> None:
        state = {"w": torch.zeros(300_000)}
        run.track(state=state)
        for _ in run.steps(range(10**5)):
            state["w"] += 1
            if run.step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)

    with pytest.raises(SystemExit):
        main()
    newest = resilient.checkpoints(tmp_path)[0]
    into = {"state": {"w": torch.zeros(300_000)}}
    resilient.load(tmp_path, into)
    assert (into["state"]["w"] == newest.step).all()


def test_between_micro_batches_a_stop_waits_for_the_optimizer(tmp_path: Path) -> None:
    at: list[int] = []

    @resilient.train(tmp_path, every=10**6)
    def main(run: Run) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for _ in run.steps(range(10**5)):
            model(torch.ones(1, 2)).sum().backward()
            if run.step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            if run.step == 8:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.02)
            at.append(run.step + 1)

    with pytest.raises(SystemExit):
        main()
    assert at[-1] % 4 == 0
    assert resilient.checkpoints(tmp_path)[0].step == at[-1]


def test_a_run_that_ends_before_it_can_stop_is_done_and_the_signal_comes_after(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:

        @resilient.train(tmp_path, every=10**6)
        def main(run: Run) -> None:
            run.track(state={"w": torch.zeros(1)})
            for _ in run.steps(range(5), total=5):
                if run.step == 4:
                    os.kill(os.getpid(), signal.SIGUSR1)

        main()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1] * 2  # when it came, and once more for what comes after the run
    assert resilient.checkpoints(tmp_path)[0].step == 5


def test_a_rank_leaves_a_note_only_once_it_has_steps_to_lose_and_is_done_before_it_hears_a_late_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESILIENT_EXITS_DIR", str(tmp_path))
    note = tmp_path / "0"
    note.write_text("1")  # of an earlier life
    heard: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(note.read_text()))
    try:

        @resilient.train(tmp_path / "run", every=10**6)
        def main(run: Run) -> None:
            assert not note.exists()
            run.track(state={"w": torch.zeros(1)})
            assert note.read_text() == ""
            for _ in run.steps(range(5), total=5):
                if run.step == 4:
                    os.kill(os.getpid(), signal.SIGTERM)

        main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == ["", "0"]


@pytest.mark.field_report("BR-169")
def test_a_grace_time_that_is_too_short_is_said_at_the_start_and_after_the_first_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "resilient")

    def once(place: Path, steps: int, **settings: object) -> list[str]:
        caplog.clear()

        @resilient.train(place, every=1, **settings)  # type: ignore[arg-type]  # passed on
        def main(run: Run) -> None:
            state = {"w": torch.rand(500_000)}
            run.track(state=state)
            before = [told for told in caplog.messages if "may lose steps" in told]
            for _ in run.steps(range(steps), total=steps):
                state["w"] += 1
            assert bool(before) == ("max_bandwidth" in settings)

        main()
        return [told for told in caplog.messages if "may lose steps" in told]

    (told,) = once(tmp_path / "1", 1, max_bandwidth="1MB/s", grace_s=2, compress="off")
    assert "takes about 2 s (2 MB of each rank at 1 MB/s, max_bandwidth)" in told
    assert "ended within 2 s (the setting grace_s)" in told
    assert "say grace_s=10" in told
    assert not once(tmp_path / "2", 2)
    bus = Bus()
    heard: list[Event] = []
    GraceCheck(
        Grace(seconds=30, source="torchrun's default"), Settings(), Peers(0, 1, _OwnMemory()), launched=True, bus=bus
    )
    bus.subscribe(heard.append)
    bus.emit(SaveCommitted(step=7, nbytes=1, duration_s=27.0))
    assert not [each for each in heard if isinstance(each, Notice)]
    for step in (8, 9):
        bus.emit(SaveCommitted(step=step, nbytes=1, duration_s=38.0))
    (said,) = [each.message for each in heard if isinstance(each, Notice)]
    assert "takes about 38 s (as that of step 8 did)" in said
    assert "ended within 30 s (torchrun's default); start torchrun with --shutdown-timeout=60" in said


def test_under_torchrun_the_shorter_of_its_own_time_and_the_setting_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from resilient.config import Process
    from resilient.run import grace
    from resilient.run.grace import grace_of

    launched = Process(elastic_id="x")
    assert grace_of(Settings(), Process()).seconds == 30
    assert grace_of(Settings(grace_s=90), Process()).seconds == 90
    assert grace_of(Settings(grace_s=90), launched).source == "torchrun's default"
    assert grace_of(Settings(grace_s=9), launched).seconds == 9
    assert grace_of(Settings(), Process(elastic_id="x", shutdown_timeout="120")).seconds == 120
    monkeypatch.setattr(grace, "_flag", lambda: "60")
    assert grace_of(Settings(grace_s=90), launched).source == "torchrun's --shutdown-timeout"


def test_a_stop_that_cannot_be_saved_in_time_says_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "resilient")
    started_s = time.monotonic()

    @resilient.train(tmp_path, every=10**6, max_bandwidth="0.3MB/s", compress="off", grace_s=2)
    def main(run: Run) -> None:
        state = {"w": torch.rand(500_000)}
        run.track(state=state)
        for _ in run.steps(range(10**5)):
            if run.step == 1:
                run.save().wait(60)
            run.fence()
            state["w"] += 1
            if run.step == 3:  # the next save waits for as long as the first one was worth
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 75
    assert time.monotonic() - started_s < 20
    (told,) = [told for told in caplog.messages if told.startswith("stopped at")]
    assert "not saved (not in time, the writer goes on with it); the newest committed step is 1" in told
    end = time.monotonic() + 60
    while len(resilient.checkpoints(tmp_path)) < 2:  # which the next start would wait for
        assert time.monotonic() < end
        time.sleep(0.1)


def test_outside_of_a_step_it_is_said_what_will_be_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "resilient")

    @resilient.train(tmp_path, every=10**6, grace_s=2)
    def main(run: Run) -> None:
        run.track(state={"w": torch.zeros(1)})
        for _ in run.steps(range(10**5)):
            if run.step == 3:
                run.save().wait(30)
            if run.step == 4:
                with run.section("eval"):
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(2.5)

    with pytest.raises(SystemExit):
        main()
    (told,) = [told for told in caplog.messages if "no step has ended" in told]
    assert "in section 'eval', after step 4; nothing was saved since step 3" in told


class Samples(Dataset[int]):
    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_loader_workers_do_not_die_of_the_signal_and_end_with_the_run(method: str, tmp_path: Path) -> None:
    workers: list[int] = []
    others = {child.pid for child in multiprocessing.active_children()}  # of other tests, which must live

    @resilient.train(tmp_path / method, every=10**6)
    def main(run: Run) -> None:
        run.track(state={"w": torch.zeros(1)})
        loader = DataLoader(Samples(), batch_size=2, num_workers=2, multiprocessing_context=method)
        for _ in run.steps(loader):
            if run.step == 2:
                workers.extend(child.pid for child in multiprocessing.active_children() if child.pid)
                workers[:] = [worker for worker in workers if worker not in others]
                assert len(workers) >= 2
                for number in NUMBERS:
                    for worker in workers:
                        os.kill(worker, number)
            if run.step == 60:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 75
    for worker in workers:  # whatever goes on with them now, SIGTERM ends them
        try:
            os.kill(worker, signal.SIGTERM)
        except ProcessLookupError:
            continue
    end = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() and _state(worker) != "Z" for worker in workers):
        assert time.monotonic() < end
        time.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Timed out waiting 8000ms for recv operation to complete"), True),
        (torch.distributed.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (torch.distributed.DistNetworkError("Connection reset by peer"), True),
        (PeerError("no answer from rank 1", kind=ErrorKind.PEER_TIMEOUT), True),
        (ConnectionResetError(104, "Connection reset by peer"), False),  # of a loader's queue
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("record 7 cannot be decoded"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_which_failures_follow_from_those_of_others(error: BaseException, follows: bool) -> None:
    assert is_secondary(error) is follows


def lose_a_peer(place: str) -> None:
    @resilient.train(place, every=10**6)
    def main(run: Run) -> None:
        run.track(state={"w": torch.zeros(1)})
        for _ in run.steps(range(10**5)):
            if run.step == 3 and run.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            torch.distributed.all_reduce(torch.ones(1))

    main()


def resize(place: str, node: str) -> None:
    @resilient.train(place, every=10**6)
    def main(run: Run) -> None:
        run.track(state={"w": torch.zeros(1)})
        for _ in run.steps(range(10**5)):
            torch.distributed.all_reduce(torch.ones(1))
            if run.step == 3 and run.rank == 1:
                Node(Path(node)).ask(Asked(kind="resize", why="a node has come"))
            time.sleep(0.01)

    main()


def test_a_rank_whose_peer_has_failed_waits_for_its_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = tmp_path / "node"
    node.mkdir()
    monkeypatch.setenv("RESILIENT_NODE_DIR", str(node))
    life = Life(2, tmp_path / "life", lose_a_peer, str(tmp_path / "run"))
    end = time.monotonic() + 90
    while not Node(node).parked():
        assert life.alive, life.output()
        assert time.monotonic() < end, life.output()
        time.sleep(0.05)
    (parked,) = Node(node).parked()
    assert (parked.kind, parked.local_rank) == ("peer-failed", 0)
    started_s = time.monotonic()
    os.kill(parked.pid, signal.SIGTERM)
    assert life.wait(30) == [-signal.SIGTERM, -signal.SIGKILL]
    assert time.monotonic() - started_s < 5


def test_a_resize_is_saved_by_all_who_then_wait_for_their_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = tmp_path / "node"
    node.mkdir()
    monkeypatch.setenv("RESILIENT_NODE_DIR", str(node))
    life = Life(2, tmp_path / "life", resize, str(tmp_path / "run"), str(node))
    end = time.monotonic() + 90
    while len(Node(node).parked()) < 2:
        assert life.alive, life.output()
        assert time.monotonic() < end, life.output()
        time.sleep(0.05)
    parked = Node(node).parked()
    assert [each.kind for each in parked] == ["resize"] * 2
    (step,) = {each.step for each in parked}
    assert [found.step for found in resilient.checkpoints(tmp_path / "run")] == [step]
    for each in parked:
        os.kill(each.pid, signal.SIGTERM)
    assert life.wait(30) == [-signal.SIGTERM] * 2


def test_whoever_still_waits_for_a_commit_when_its_agent_restarts_it_ends_as_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = tmp_path / "node"
    node.mkdir()
    monkeypatch.setenv("RESILIENT_NODE_DIR", str(node))
    monkeypatch.setenv("RESILIENT_EXITS_DIR", str(tmp_path))
    life = Life(1, tmp_path / "life", resize_slowly, str(tmp_path / "run"), str(node))
    end = time.monotonic() + 90
    while not (node / "asked.json").exists():
        assert life.alive, life.output()
        assert time.monotonic() < end, life.output()
        time.sleep(0.05)
    time.sleep(1.5)
    assert life.alive, life.output()
    assert not Node(node).parked()
    Node(node).restart()
    os.kill(int((tmp_path / "run-pid").read_text()), signal.SIGTERM)
    assert life.wait(30) == [143], life.output()
    assert (tmp_path / "0").read_text() == "", "not the code to start the whole job again"


def resize_slowly(place: str, node: str) -> None:
    Path(f"{place}-pid").write_text(str(os.getpid()))

    @resilient.train(place, every=10**6, max_bandwidth="0.3MB/s", compress="off")
    def main(run: Run) -> None:
        state = {"w": torch.rand(3_000_000)}
        run.track(state=state)
        for _ in run.steps(range(10**5)):
            if run.step == 1:
                run.save().wait(60)
            run.fence()
            state["w"] += 1
            if run.step == 3:  # the next save waits for as long as the first one was worth
                Node(Path(node)).ask(Asked(kind="resize", why="a node has come"))
            time.sleep(0.01)

    main()


def test_ranks_whose_sibling_was_killed_end_at_once_when_the_agent_ends_them(tmp_path: Path) -> None:
    life = Life(2, tmp_path / "life", hang_without_a_peer, str(tmp_path / "run"), str(tmp_path))
    end = time.monotonic() + 90
    while not (tmp_path / "hangs").exists():
        assert life.alive, life.output()
        assert time.monotonic() < end, life.output()
        time.sleep(0.05)
    life.kill(1)
    time.sleep(0.5)
    started_s = time.monotonic()
    os.kill(int((tmp_path / "hangs").read_text()), signal.SIGTERM)
    assert life.wait(30) == [143, -signal.SIGKILL], life.output()
    assert time.monotonic() - started_s < 5


def hang_without_a_peer(place: str, folder: str) -> None:
    @resilient.train(place, every=10**6)
    def main(run: Run) -> None:
        run.track(state={"w": torch.zeros(1)})
        for _ in run.steps(range(10**5)):
            if run.step == 3:
                if run.rank == 0:
                    (Path(folder) / "hangs.new").write_text(str(os.getpid()))
                    (Path(folder) / "hangs.new").rename(Path(folder) / "hangs")
                time.sleep(300)  # as in a collective that nobody aborts

    main()


def test_a_store_that_is_away_is_no_reason_to_stop(caplog: pytest.LogCaptureFixture) -> None:
    from resilient.errors import StoreError
    from resilient.run.stop_sources import StoreRequests

    class Away(MemoryStore):
        def size(self, key: str) -> int:
            raise StoreError("the store is away", kind=ErrorKind.UNREACHABLE)

    from resilient.detect.polling import Poller

    told: list[str] = []
    poller = Poller(StoreRequests(Away(), "launch"), 1.0, notice=told.append)
    for _ in range(3):
        poller.ask()
    assert poller.newest is None
    assert len(told) == 1


def test_a_request_to_a_launch_holds_for_its_restarts_and_for_no_other() -> None:
    from resilient.catalog.generations import claim_generation
    from resilient.run.stop_sources import StoreRequests

    store = MemoryStore()
    claim_generation(store, world_size=1, launch="this", heartbeat=True)
    ask(store, "stop", why="", clock=SYSTEM_CLOCK)
    assert StoreRequests(store, "this").poll() is not None
    later = StoreRequests(store, "the next")
    assert later.poll() is None
    ask(store, "resize", nodes=2, why="", clock=SYSTEM_CLOCK)
    assert later.poll() is None
    ask(store, "stop", why="", clock=SYSTEM_CLOCK)
    assert later.poll() is not None
