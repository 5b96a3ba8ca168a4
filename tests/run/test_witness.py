"""What a rank leaves of a failure: its words, whose code they came from, and what the kernel says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Queue

import msgspec
import pytest
import torch

import resilient
from resilient.catalog.evidence import read_evidence
from resilient.catalog.process import host, started
from resilient.config import Process
from resilient.engine.peers import Peers
from resilient.errors import UsageError
from resilient.events import Event, FailureExplained
from resilient.run import witness, witness_kernel
from resilient.run.session import Run
from resilient.run.witness_traceback import frames, frames_now, owner_of, words
from resilient.run.witness_watch import Neighbor, Watch
from resilient.store.base import Store
from resilient.store.local import LocalStore
from tests.engine.rank_threads import SharedValues


def raised(call: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def test_words_are_those_of_the_error_and_of_what_it_follows_from() -> None:
    def fail() -> None:
        try:
            os.environ["RESILIENT_ABSENT"]
        except KeyError as error:
            raise ValueError("two\nlines") from error

    assert words(raised(fail)) == ("ValueError: two", "lines", "KeyError: 'RESILIENT_ABSENT'")
    assert words(torch.OutOfMemoryError("CUDA out of memory")) == ("torch.OutOfMemoryError: CUDA out of memory",)


def test_each_frame_has_an_owner() -> None:
    error = raised(lambda: torch.nn.Linear(2, 2)(torch.ones(3)))
    owners = [frame.owner for frame in frames(error)]
    assert owners[0] == "user"
    assert owners[-1] == "torch"
    assert owner_of(resilient.__file__) == "resilient"
    assert owner_of(threading.__file__) == "python"
    assert owner_of(pytest.__file__) == "library"


def test_where_a_thread_is_can_be_seen_from_another_one() -> None:
    here: list[object] = []
    thread = threading.Thread(target=lambda: here.append(frames_now(threading.main_thread().ident or 0)))
    thread.start()
    thread.join()
    (seen,) = here
    assert [each.function for each in seen if each.file == __file__][-1] == sys._getframe().f_code.co_name  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import os; os._exit(7)", "exit code 7"),
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("", "exit code 0"),
    ],
)
def test_how_a_process_ended_is_seen_before_its_parent_looks(code: str, how: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", code])
    file, (hear, tell) = os.pidfd_open(process.pid), os.pipe()
    assert witness_kernel.how_ended(process.pid) == ""
    assert witness_kernel.await_end([file], hear) == [file]
    assert witness_kernel.how_ended(process.pid) == how
    process.wait()
    assert witness_kernel.how_ended(process.pid) == ""
    for each in (file, hear, tell):
        os.close(each)


def test_the_last_lines_of_a_ranks_own_stderr_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "stderr"
    path.write_text("".join(f"line {number}\n" for number in range(100_000)))
    lines = witness_kernel.tail(str(path))
    assert (lines[-1], len(lines)) == ("line 99999", 40)
    assert witness_kernel.tail(str(tmp_path / "absent")) == ()


def train(place: Path | Store, error: BaseException | None, *, section: str = "") -> None:
    @resilient.train(place, every=10**6)
    def main(run: Run) -> None:
        run.track(state={"w": torch.zeros(1)})
        for _ in run.steps(range(20), total=20):
            if run.step == 8 and error is not None:
                with run.section(section):
                    raise error

    main()


def test_a_life_that_fails_leaves_a_record_and_one_that_does_not_leaves_none(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(ValueError, match="record 17"):
        train(tmp_path, ValueError("record 17 is broken"), section="evaluation")
    (record,) = read_evidence(store, 1)
    assert record.lines == ("ValueError: record 17 is broken",)
    assert (record.rank, record.step, record.section, record.seen_by) == (0, 8, "evaluation", None)
    assert record.pid == os.getpid()
    assert record.frames[-1].owner == "user"
    train(tmp_path, None)
    assert read_evidence(store, 2) == []


def test_a_clean_exit_is_no_failure_and_another_one_is(tmp_path: Path) -> None:
    for code in (0, 9):
        with pytest.raises(SystemExit):
            train(tmp_path, SystemExit(code))
    store = LocalStore(tmp_path)
    assert read_evidence(store, 1) == []
    assert [record.lines for record in read_evidence(store, 2)] == [("SystemExit: 9",)]


def explained(monkeypatch: pytest.MonkeyPatch, place: Path, error: BaseException | None) -> list[FailureExplained]:
    from resilient.run import decorator

    told: list[FailureExplained] = []

    def note(event: Event) -> None:
        if isinstance(event, FailureExplained):
            told.append(event)

    monkeypatch.setattr(decorator, "show_logs", lambda bus: bus.subscribe(note))
    if error is None:
        train(place, None)
    else:
        with pytest.raises(type(error)):
            train(place, error)
    return told


def test_the_next_life_says_why_this_one_failed_before_it_does_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert explained(monkeypatch, tmp_path, KeyError("x")) == []
    (first,) = explained(monkeypatch, tmp_path, KeyError("x"))
    assert (first.generation, first.failure, first.at_rank, first.action, first.acts) == (
        1,
        "user-error",
        0,
        "restart",
        True,
    )
    (second,) = explained(monkeypatch, tmp_path, None)
    assert (second.generation, second.action, second.acts) == (2, "stop", False), "advice: the run stops at the third"
    assert explained(monkeypatch, tmp_path, None) == []


def test_who_only_observes_goes_on_where_a_run_would_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        with pytest.raises(KeyError):
            train(tmp_path, KeyError("x"))
    monkeypatch.setenv("RESILIENT_POLICY", "observe")
    (told,) = explained(monkeypatch, tmp_path, KeyError("x"))
    assert (told.action, told.acts) == ("stop", False)
    monkeypatch.setenv("RESILIENT_POLICY", "act")
    with pytest.raises(UsageError, match="the last 4 lives"):
        train(tmp_path, None)


def test_rules_that_cannot_be_used_are_told_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = tmp_path / "rules.toml"
    monkeypatch.setenv("RESILIENT_RULES", str(rules))
    rules.write_text('[[rule]]\nclass = "sunspots"\npatterns = ["x"]')
    with pytest.raises(UsageError, match="sunspots"):
        train(tmp_path / "run", None)
    rules.write_text('[[rule]]\nclass = "device-hardware"\npatterns = ["x is gone"]')
    explained(monkeypatch, tmp_path / "run", ValueError("x is gone"))
    (told,) = explained(monkeypatch, tmp_path / "run", None)
    assert (told.failure, told.action) == ("device-hardware", "exclude-node")


def test_a_store_that_is_away_delays_an_exit_no_longer_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = threading.Event()
    monkeypatch.setattr(witness, "write_evidence", lambda *_: away.wait(60))
    monkeypatch.setattr(witness, "_TAKES_S", 0.5)
    started_s = time.monotonic()
    with pytest.raises(ValueError, match="x"):
        train(tmp_path, ValueError("x"))
    away.set()
    assert time.monotonic() - started_s < 10


def test_a_neighbor_that_never_introduces_itself_holds_up_nobody() -> None:
    seen: list[object] = []
    peers = Peers(0, 2, SharedValues())
    watch = Watch(peers, "w", Process(local_world_size=2, world_size=2), lambda *what: seen.append(what))
    watch.start()
    started_s = time.monotonic()
    watch.close()
    watch.close()
    assert time.monotonic() - started_s < 2.5
    assert not seen


def test_the_end_of_a_neighbor_is_seen_at_once_and_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    values, seen = SharedValues(), Queue[tuple[Neighbor, str]]()
    watch = Watch(Peers(0, 2, values), "w", Process(local_world_size=2, world_size=2), lambda *what: seen.put(what))
    neighbor = Neighbor(1, host(), process.pid, started(process.pid), "")
    Peers(1, 2, values).publish("w/1", msgspec.msgpack.encode(neighbor))
    watch.start()
    time.sleep(0.3)
    assert seen.empty()
    process.kill()
    assert seen.get(timeout=10) == (neighbor, "SIGKILL")
    process.wait()
    watch.close()
    assert seen.empty()


def test_a_forked_worker_does_not_keep_the_watch_alive_that_a_stop_has_closed() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    values, seen = SharedValues(), Queue[tuple[Neighbor, str]]()
    watch = Watch(Peers(0, 2, values), "w", Process(local_world_size=2, world_size=2), lambda *what: seen.put(what))
    Peers(1, 2, values).publish(
        "w/1", msgspec.msgpack.encode(Neighbor(1, host(), process.pid, started(process.pid), ""))
    )
    watch.start()
    time.sleep(0.3)
    worker = os.fork()  # as a DataLoader does
    if worker == 0:
        time.sleep(60)
        os._exit(0)
    try:
        begun_s = time.monotonic()
        watch.close()
        assert time.monotonic() - begun_s < 1.0
        process.kill()
        process.wait()
        time.sleep(0.5)
        assert seen.empty(), "the others may end as they like"
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_signals_have_names() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    file, (hear, tell) = os.pidfd_open(process.pid), os.pipe()
    os.write(tell, b"x")
    assert witness_kernel.await_end([file], hear) == [], "who is told to stop waits no longer"
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PIDFD, file, os.WEXITED | os.WNOWAIT)
    assert witness_kernel.how_ended(process.pid) == "SIGKILL"
    process.wait()
    for each in (file, hear, tell):
        os.close(each)
