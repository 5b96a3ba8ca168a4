"""A writer in a process of its own: what it survives, what it costs, and what is said when it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resilient.catalog.line import read_line
from resilient.catalog.process import started
from resilient.errors import ErrorKind, PeerError
from resilient.format.documents import Claim
from resilient.store.local import LocalStore
from resilient.writer.messages import Answer, Committed, Died, Failed, Persisted, Ready, Taken
from resilient.writer.outliving import DEAF
from resilient.writer.presence import in_flight
from resilient.writer.process import ProcessWriter
from resilient.writer.slot import Slot
from tests.catalog.runs import new_generation
from tests.writer.staging import Trainer, is_step, opened, state


def start(store: LocalStore, claim: Claim, rank: int = 0, world_size: int = 1, **settings: Any) -> Trainer:
    trainer = Trainer(claim)
    again(trainer, store, rank, world_size, **settings)
    return trainer


def again(trainer: Trainer, store: LocalStore, rank: int = 0, world_size: int = 1, **settings: Any) -> None:
    """Give it another writer, with the same slots."""
    first = opened(store, trainer.claim, rank, world_size, **settings)
    trainer.has(lambda heard: ProcessWriter(first, trainer.slots, heard))


def process_of(trainer: Trainer) -> ProcessWriter:
    assert isinstance(trainer.link, ProcessWriter)
    return trainer.link


def gone(pid: int, timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while started(pid):
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the lists of saves in flight where no other test looks."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield
    monkeypatch.setattr("tempfile.tempdir", None)


def test_saves_are_committed_and_the_process_goes_when_it_is_closed(store: LocalStore) -> None:
    trainer = start(store, new_generation(store))
    ready = trainer.wait(Ready)
    assert ready.pid == process_of(trainer).pid != os.getpid()
    for step in (1, 2):
        trainer.save(step, state(step), new=step == 1)
        assert isinstance(trainer.outcome(step), Committed)
        is_step(store, step, state(step))
    kinds = [type(each) for each in trainer.answers]
    assert kinds == [Ready, Taken, Persisted, Committed, Taken, Persisted, Committed]
    assert process_of(trainer).close(10)
    assert gone(ready.pid, 0)
    assert not process_of(trainer).alive
    with pytest.raises(PeerError):
        trainer.save(3, state(3), new=False)
    assert not [each for each in trainer.answers if isinstance(each, Died)]


def test_the_process_has_no_torch_little_memory_and_no_files_of_the_trainer(store: LocalStore, tmp_path: Path) -> None:
    inherited = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(inherited, True)
    trainer = start(store, new_generation(store), rank=0)
    pid = process_of(trainer).pid
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "/torch/" not in maps
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("Rss")
    )
    assert sum(int(amount.split()[0]) for amount in status.values()) < 80 << 10, status
    files = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
    assert str(tmp_path) not in files
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    assert "-m resilient.writer rank 0 of process" in " ".join(words)
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + 10
    assert os.getsid(pid) == pid
    os.close(inherited)
    assert process_of(trainer).close(10)


def test_modules_that_lie_in_the_working_directory_are_not_imported(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("msgspec", "queue", "torch", "signal"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    trainer = start(store, new_generation(store))
    assert process_of(trainer).close(10)


@pytest.mark.field_report("BR-178")
def test_signals_that_end_a_trainer_do_not_end_its_writer(store: LocalStore) -> None:
    trainer = start(store, new_generation(store))
    trainer.save(1, state(1))
    for number in DEAF:
        os.kill(process_of(trainer).pid, number)
    assert isinstance(trainer.outcome(1), Committed)
    assert process_of(trainer).close(10)


def test_a_writer_that_is_killed_is_missed_once_and_another_one_uses_its_slots(store: LocalStore) -> None:
    trainer = start(store, new_generation(store), world_size=2)  # the other rank never comes
    trainer.save(1, state(1))
    trainer.wait(Persisted, 1)
    os.kill(process_of(trainer).pid, signal.SIGKILL)
    died = trainer.wait(Died)
    assert "was killed by SIGKILL" in died.why
    assert "rank 0" in died.why
    with pytest.raises(PeerError, match="SIGKILL"):
        trainer.save(2, state(2), new=False)
    assert not in_flight("a run")
    again(trainer, store)
    trainer.save(3, state(3))
    assert isinstance(trainer.outcome(3), Committed)
    is_step(store, 3, state(3))
    assert process_of(trainer).close(10)
    assert len([each for each in trainer.answers if isinstance(each, Died)]) == 1


def test_a_writer_that_hangs_can_be_ended(store: LocalStore) -> None:
    trainer = start(store, new_generation(store))
    os.kill(process_of(trainer).pid, signal.SIGSTOP)
    trainer.save(1, state(1))
    process_of(trainer).kill()
    assert "was killed by SIGKILL" in trainer.wait(Died).why
    again(trainer, store)
    trainer.save(2, state(2))
    assert isinstance(trainer.outcome(2), Committed)
    assert process_of(trainer).close(10)


def test_a_writer_that_cannot_open_its_store_says_why_it_ended(store: LocalStore) -> None:
    claim = new_generation(store)
    heard: list[object] = []
    first = opened(store, claim, options={"token": "secret"})
    writer = ProcessWriter(first, [Slot.create("test")], heard.append)
    with pytest.raises(PeerError, match="takes no storage options") as caught:
        writer.wait_ready(30)
    assert caught.value.kind is ErrorKind.PEER_FAILED
    assert writer.close(5)
    died = [each for each in heard if isinstance(each, Died)]
    assert len(died) == 1
    assert "secret" not in died[0].why


def test_a_writer_is_missed_though_a_process_of_the_trainers_holds_its_end_of_the_socket(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = socket.socketpair
    held: list[socket.socket] = []

    def inherited() -> tuple[socket.socket, socket.socket]:
        ours, theirs = make()
        held.append(theirs.dup())  # as a data loader has it that is forked while the writer is started
        return ours, theirs

    monkeypatch.setattr(socket, "socketpair", inherited)
    trainer = start(store, new_generation(store))
    os.kill(process_of(trainer).pid, signal.SIGKILL)
    assert "was killed by SIGKILL" in trainer.wait(Died, timeout_s=10).why
    held[0].close()


def test_when_a_writer_counts_as_gone_its_death_has_been_heard_whatever_that_raised(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: hooked.append(arguments.exc_type))
    heard: list[Answer] = []
    may_end = threading.Event()

    def hear(answer: Answer) -> None:
        if isinstance(answer, Died):
            assert may_end.wait(30)
        heard.append(answer)
        raise SystemExit

    writer = ProcessWriter(opened(store, new_generation(store)), [], hear)
    writer.wait_ready(30)
    os.kill(writer.pid, signal.SIGKILL)
    assert gone(writer.pid, 10)
    time.sleep(0.2)
    alive = [writer.alive]
    may_end.set()
    assert writer.close(10)
    alive.append(writer.alive)
    assert alive == [True, False], "whoever makes another one before would lose its saves to this one's end"
    assert [type(each) for each in heard] == [Ready, Died]
    assert hooked == [SystemExit, SystemExit]


@pytest.mark.field_report("BR-051")
def test_a_disk_that_is_full_for_one_save_is_not_for_the_next(store: LocalStore) -> None:
    trainer = start(store, new_generation(store))
    data = store.root / "data"
    data.write_text("in the way")
    trainer.save(1, state(1))
    failed = trainer.outcome(1)
    assert isinstance(failed, Failed)
    assert "Not a directory" in str(failed.error.error())
    data.unlink()
    trainer.save(2, state(2), new=False)
    assert isinstance(trainer.outcome(2), Committed)
    assert process_of(trainer).close(10)


TRAINER = """
import os, signal, sys, time
from pathlib import Path
from resilient.catalog.generations import read_claim
from resilient.store.local import LocalStore
from resilient.writer.messages import Taken
from resilient.writer.process import ProcessWriter
from tests.writer.staging import Trainer, opened, state

place, rank, world_size, step, nbytes, late = sys.argv[1], *map(int, sys.argv[2:6]), float(sys.argv[6])
store = LocalStore(place)
trainer = Trainer(read_claim(store, 1))
trainer.has(lambda heard: ProcessWriter(opened(store, trainer.claim, rank, world_size), trainer.slots, heard))
Path(place + f".pid-{rank}").write_text(str(trainer.link.pid))
if os.fork() == 0:  # a data loader: it outlives the trainer for a while, and holds copies of its files
    time.sleep(3)
    os._exit(0)
time.sleep(late)
trainer.save(step, {f"of{rank}-{name}": array for name, array in state(step + rank, nbytes).items()})
trainer.wait(Taken)
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_trainer(store: LocalStore, *arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", TRAINER, store.url, *map(str, arguments)])


def expected(step: int, rank: int, nbytes: int) -> dict[str, Any]:
    return {f"of{rank}-{name}": array for name, array in state(step + rank, nbytes).items()}


def committed(store: LocalStore, step: int, timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while step not in [commit.step for commit in read_line(store).commits]:
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("nbytes", [1 << 16, 32 << 20])
def test_a_save_whose_trainer_is_killed_right_after_it_was_taken_is_committed(store: LocalStore, nbytes: int) -> None:
    new_generation(store)
    for step in (1, 2):
        trainer = run_trainer(store, 0, 1, step, nbytes, 0)
        assert trainer.wait(60) == -signal.SIGKILL
        found = in_flight("a run")
        assert committed(store, step, 0) or [(each.step, each.rank) for each in found] == [(step, 0)]
        assert committed(store, step, 30)
        is_step(store, step, expected(step, 0, nbytes))
        assert gone(int(Path(store.url + ".pid-0").read_text()), 5)
    assert not in_flight("a run")


def test_two_trainers_killed_at_different_times_leave_one_checkpoint(store: LocalStore) -> None:
    new_generation(store)
    trainers = [run_trainer(store, rank, 2, 1, 1 << 16, 2.0 * rank) for rank in range(2)]
    assert trainers[0].wait(60) == -signal.SIGKILL
    assert [(each.step, each.rank, each.world_size) for each in in_flight("a run")] == [(1, 0, 2)]
    assert trainers[1].wait(60) == -signal.SIGKILL
    assert committed(store, 1, 30)
    is_step(store, 1, expected(1, 0, 1 << 16) | expected(1, 1, 1 << 16))
    for rank in range(2):
        assert gone(int(Path(store.url + f".pid-{rank}").read_text()), 5)


def test_a_writer_whose_trainer_is_gone_gives_up_once_a_newer_generation_has_begun_elsewhere(
    store: LocalStore,
) -> None:
    new_generation(store)
    trainer = run_trainer(store, 0, 2, 1, 1 << 16, 0)
    assert trainer.wait(60) == -signal.SIGKILL
    pid = int(Path(store.url + ".pid-0").read_text())
    assert not gone(pid, 2.0), "it waits for the other rank"
    new_generation(store)
    assert gone(pid, 5)


def test_a_wait_for_a_writer_that_never_gets_ready_has_an_end(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_process: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen

    def slow(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return start_process([sys.executable, "-c", "import time; time.sleep(60)"], **options)

    monkeypatch.setattr(subprocess, "Popen", slow)
    writer = ProcessWriter(opened(store, new_generation(store)), [], lambda answer: None)
    with pytest.raises(PeerError, match=r"not ready after 0.2 s") as caught:
        writer.wait_ready(0.2)
    assert caught.value.kind is ErrorKind.PEER_TIMEOUT
    os.kill(writer.pid, signal.SIGKILL)
    assert writer.close(10)
