"""What a writer does with a save, whichever way the orders come: here they come by a thread."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from resilient.catalog.contents import read_manifest
from resilient.catalog.line import read_line
from resilient.errors import ErrorKind, PeerError, StoreError
from resilient.format.digest import BytesLike
from resilient.format.documents import Claim
from resilient.policy.keep import Keep
from resilient.store.base import Store
from resilient.store.local import LocalStore
from resilient.store.memory import MemoryStore
from resilient.store.retrying import Retrying
from resilient.writer.in_thread import ThreadWriter
from resilient.writer.messages import Answer, Committed, Died, Failed, Noticed, Persisted, Pruned, Taken
from resilient.writer.slot import Slot
from tests.catalog.runs import new_generation
from tests.writer.staging import Trainer, is_step, opened, state


def trainer_of(
    store: Store, claim: Claim, rank: int = 0, world_size: int = 1, *, chunk_nbytes: int = 1 << 16, **settings: object
) -> Trainer:
    trainer = Trainer(claim, chunk_nbytes=chunk_nbytes)
    first = opened(store, claim, rank, world_size, **settings)
    trainer.has(lambda heard: ThreadWriter(store, first, trainer.slots, heard))
    return trainer


@pytest.fixture
def start() -> Iterator[Callable[..., Trainer]]:
    trainers: list[Trainer] = []

    def begin(*args: object, **settings: object) -> Trainer:
        trainers.append(trainer_of(*args, **settings))  # type: ignore[arg-type]
        return trainers[-1]

    yield begin
    for each in trainers:
        assert each.link is not None
        assert each.link.close(30)


def test_a_save_is_taken_then_persisted_then_committed_and_every_byte_comes_back(
    start: Callable[..., Trainer],
) -> None:
    store = MemoryStore()
    trainer = start(store, new_generation(store))
    trainer.object_nbytes = 1 << 18
    for step in (1, 2):
        trainer.save(step, state(step))
        trainer.outcome(step)
        is_step(store, step, state(step))
    nbytes = sum(array.nbytes for array in state(1).values())
    taken, persisted, committed = trainer.answers[:3]
    assert taken == Taken(step=1)
    assert isinstance(persisted, Persisted)
    assert (persisted.nbytes, persisted.sent, committed) == (nbytes, nbytes, Committed(step=1, nbytes=nbytes))
    objects = read_manifest(store, read_line(store).at(1)).objects
    assert len(objects) == -(-nbytes // (1 << 18)), "few objects, none larger than was asked for"


class Failing(MemoryStore):
    """A store that fails in what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: Callable[[str, str], None] = lambda verb, key: None

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        self.fails("put", key)
        super().put(key, parts)

    def list(self, prefix: str) -> Iterator[str]:
        self.fails("list", prefix)
        return super().list(prefix)


@pytest.mark.field_report("BR-051")
@pytest.mark.parametrize(
    "error",
    [StoreError("no space left", kind=ErrorKind.NO_SPACE), ZeroDivisionError("a bug")],
    ids=["of the store", "a bug"],
)
def test_a_save_that_fails_is_said_leaves_nothing_and_the_next_one_works(
    start: Callable[..., Trainer], error: Exception
) -> None:
    store = Failing()

    def fails(verb: str, key: str) -> None:
        if verb == "put" and key.startswith("data/") and key.endswith("-1") and broken:
            raise error

    store.fails = fails
    broken = True
    trainer = start(store, new_generation(store))
    trainer.object_nbytes = 1 << 18
    trainer.save(1, state(1))
    failed = trainer.outcome(1)
    assert isinstance(failed, Failed)
    assert (failed.slot, failed.persisted) == (0, False)
    assert str(error) in str(failed.error.error())
    assert failed.error.kind == (error.kind if isinstance(error, StoreError) else ErrorKind.SAVE_FAILED)
    if isinstance(error, StoreError):
        assert not list(store.list("data/"))
        assert [key.rpartition("/")[2] for key in store.list("steps/")] == ["TOMBSTONE"]
    broken = False
    trainer.save(2, state(2))
    assert isinstance(trainer.outcome(2), Committed)
    is_step(store, 2, state(2))


@pytest.mark.parametrize("when", ["before it is read", "while it is written"])
def test_a_slot_that_is_staged_over_before_it_is_durable_fails_the_save_and_nothing_is_committed(
    start: Callable[..., Trainer], when: str
) -> None:
    store = Failing()
    trainer = start(store, claim := new_generation(store))

    def stage_over(verb: str, key: str) -> None:
        if verb == "put" and when == "while it is written":
            trainer.slots[0].begin(generation=claim.generation, step=2)

    store.fails = stage_over
    order = trainer.staged(1, state(1))
    if when == "before it is read":
        trainer.staged(2, state(2))
    trainer.order(order)
    failed = trainer.outcome(1)
    assert isinstance(failed, Failed)
    assert "staged over" in str(failed.error.error())
    assert not read_line(store).commits
    assert not list(store.list("data/"))


def test_two_ranks_commit_once_when_the_late_one_has_written_its_part(start: Callable[..., Trainer]) -> None:
    store = MemoryStore()
    claim = new_generation(store)
    halves = [{f"of{rank}": array for array in state(rank).values()} for rank in range(2)]
    ranks = [start(store, claim, rank, 2) for rank in range(2)]
    ranks[0].save(1, {**halves[0]}, replicas={"shared": state(7)["wide"]})
    ranks[0].wait(Persisted, 1)
    assert not read_line(store).commits
    ranks[1].save(1, {**halves[1], "shared": state(7)["wide"]})
    for rank in ranks:
        assert isinstance(rank.outcome(1), Committed)
    is_step(store, 1, {**halves[0], **halves[1], "shared": state(7)["wide"]})


def test_a_step_that_another_rank_cannot_save_is_not_waited_for(start: Callable[..., Trainer]) -> None:
    store = MemoryStore()
    trainer = start(store, new_generation(store), 0, 2)
    assert trainer.link is not None
    trainer.link.abandon(1, "rank 1: StoreError: no space")
    trainer.save(1, state(1))
    trainer.wait(Failed, 1)
    trainer.save(2, state(2), new=False)
    trainer.wait(Persisted, 2)
    trainer.link.abandon(2, "rank 1: StoreError: no space")
    for step in (1, 2):
        failed = trainer.wait(Failed, step)
        error = failed.error.error()
        assert isinstance(error, PeerError)
        assert error.kind is ErrorKind.PEER_FAILED
        assert str(error) == f"step {step} of generation 1 will not be committed: rank 1: StoreError: no space"
        assert failed.persisted


def test_a_rank_that_never_writes_its_part_is_named_at_the_deadline(start: Callable[..., Trainer]) -> None:
    store = MemoryStore()
    trainer = start(store, new_generation(store), 0, 3, commit_timeout_s=0.3)
    trainer.save(1, state(1))
    error = trainer.wait(Failed, 1).error.error()
    assert isinstance(error, PeerError)
    assert (error.kind, "no receipt from rank 1, 2" in str(error)) == (ErrorKind.PEER_TIMEOUT, True)


@pytest.mark.field_report("BR-049")
def test_of_what_ranks_hold_when_they_are_lost_only_a_step_that_all_of_them_hold_is_committed(
    start: Callable[..., Trainer],
) -> None:
    store = MemoryStore()
    claim = new_generation(store)
    ranks = [start(store, claim, rank, 2, commit_timeout_s=3.0) for rank in range(2)]
    halves = [{f"of{rank}": state(rank)["wide"]} for rank in range(2)]
    ranks[0].slots.append(Slot.create("test"))
    ranks[0].save(5, halves[0])
    ranks[0].save(10, halves[0], slot=1, new=False)
    ranks[1].save(5, halves[1])  # it never gets to step 10
    for rank in ranks:
        assert isinstance(rank.link, ThreadWriter)
        rank.link._serving._worker.leave()
    assert isinstance(ranks[0].outcome(5), Committed)
    assert isinstance(ranks[0].outcome(10), Failed)
    assert [commit.step for commit in read_line(store).commits] == [5]
    is_step(store, 5, halves[0] | halves[1])


@pytest.mark.parametrize("retryable", [True, False])
def test_a_save_that_is_committed_is_not_reported_as_failed_because_that_could_not_be_checked(
    start: Callable[..., Trainer], *, retryable: bool
) -> None:
    store = Failing()

    def fails(verb: str, key: str) -> None:
        if verb == "list":
            raise StoreError("listing is down", kind=ErrorKind.UNREACHABLE, retryable=retryable)

    trainer = start(store, new_generation(store))
    store.fails = fails
    trainer.save(1, state(1))
    assert isinstance(trainer.outcome(1), Committed)
    assert "listing is down" in trainer.wait(Noticed).message


def test_a_commit_that_a_newer_launch_has_outdated_is_a_failed_save(start: Callable[..., Trainer]) -> None:
    store = MemoryStore()
    trainer = start(store, new_generation(store))
    trainer.save(1, state(1))
    trainer.outcome(1)
    new_generation(store, read_line(store).at(1))
    trainer.save(2, state(2), new=False)
    failed = trainer.outcome(2)
    assert isinstance(failed, Failed)
    assert (failed.error.kind, failed.persisted) == (ErrorKind.TAKEN_OVER, True)


def test_retention_is_applied_after_each_commit(start: Callable[..., Trainer]) -> None:
    store = MemoryStore()
    trainer = start(store, new_generation(store), keep=Keep(last=2))
    for step in range(1, 6):
        trainer.save(step, state(step), new=step == 1)
        trainer.outcome(step)
    assert trainer.link is not None
    assert trainer.link.close(30)
    assert [commit.step for commit in read_line(store).commits] == [5, 4]
    assert [each.steps for each in trainer.answers if isinstance(each, Pruned)] == [(1,), (2,), (3,)]


@pytest.mark.field_report("BR-007")
def test_what_killed_writers_have_left_half_written_is_removed_after_the_first_save_of_a_life(
    start: Callable[..., Trainer], tmp_path: Path
) -> None:
    store = LocalStore(tmp_path / "run")
    claim = new_generation(store)
    left = store.root / "data" / ".tmp-4711-0123456789abcdef"
    left.parent.mkdir()
    left.write_bytes(b"half")
    os.utime(left, (1_000, 1_000))
    trainer = start(Retrying(store), claim, keep=Keep(last=2))
    trainer.save(1, state(1))
    assert isinstance(trainer.outcome(1), Committed)
    assert trainer.link is not None
    assert trainer.link.close(30)
    assert not left.exists()
    assert [commit.step for commit in read_line(store).commits] == [1]


def test_answers_never_overlap_and_orders_do_not_wait_for_work(start: Callable[..., Trainer]) -> None:
    store = Failing()
    go_on = threading.Event()
    store.fails = lambda verb, key: assert_waited(go_on) if verb == "put" else None
    trainer = start(store, new_generation(store))
    trainer.save(1, state(1))
    trainer.wait(Taken, 1)
    assert not trainer.link.close(0.1) if trainer.link else False, "a save is in flight"
    go_on.set()
    assert isinstance(trainer.outcome(1), Committed)
    assert not [each for each in trainer.answers if isinstance(each, Died)]


def test_a_writer_that_hangs_is_left_behind_and_not_heard_any_more(start: Callable[..., Trainer]) -> None:
    store = Failing()
    go_on = threading.Event()
    store.fails = lambda verb, key: assert_waited(go_on) if verb == "put" and key.startswith("data/") else None
    trainer = start(store, new_generation(store))
    assert trainer.link is not None
    trainer.save(1, state(1))
    trainer.wait(Taken, 1)
    trainer.link.kill()
    assert "hangs" in trainer.wait(Died).why
    with pytest.raises(PeerError, match="hangs"):
        trainer.link.abandon(1, "too late")
    go_on.set()
    assert trainer.link.close(30)
    assert [type(each) for each in trainer.answers] == [Taken, Died]


@pytest.mark.parametrize("prefix", ["generations/", "data/"], ids=["when it is proven", "when it is pruned"])
def test_what_a_store_of_the_user_raises_after_the_commit_is_said_and_the_next_save_is_made(
    start: Callable[..., Trainer], prefix: str
) -> None:
    store = Failing()
    raised: list[str] = []

    def fails(verb: str, key: str) -> None:
        if verb == "list" and key.startswith(prefix) and trainer.answers and not raised:
            raised.append(key)
            raise RuntimeError("a client library's own error")

    trainer = start(store, new_generation(store), keep=Keep(last=1))
    store.fails = fails
    for step in (1, 2, 3):
        trainer.save(step, state(step), new=step == 1)
        assert isinstance(trainer.outcome(step), Committed)
    assert raised
    assert "RuntimeError: a client library's own error" in trainer.wait(Noticed).message


@pytest.mark.field_report("BR-157")
def test_a_store_that_denies_deletion_fails_no_save_and_it_is_said(start: Callable[..., Trainer]) -> None:
    class Denying(MemoryStore):
        def delete(self, key: str) -> None:
            raise StoreError(f"{key}: deletion is denied", kind=ErrorKind.ACCESS_DENIED)

    store = Denying()
    trainer = start(store, new_generation(store), keep=Keep(last=1))
    for step in (1, 2, 3, 4):
        trainer.save(step, state(step), new=step == 1)
        assert isinstance(trainer.outcome(step), Committed)
    assert "deletion is denied" in trainer.wait(Noticed).message
    assert read_line(store).commits[0].step == 4


def test_a_writer_whose_thread_ends_is_missed_once_and_before_it_counts_as_gone(
    start: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: hooked.append(arguments.exc_type))
    store = Failing()
    trainer = start(store, new_generation(store))
    link = trainer.link
    assert isinstance(link, ThreadWriter)
    alive: list[bool] = []
    hear = link._heard

    def heard(answer: Answer) -> None:
        alive.append(link.alive)
        hear(answer)

    monkeypatch.setattr(link, "_heard", heard)

    def fails(verb: str, key: str) -> None:
        raise KeyboardInterrupt

    store.fails = fails
    trainer.save(1, state(1))
    assert "was ended by KeyboardInterrupt" in trainer.wait(Died).why
    assert link._over.wait(30)
    assert not link.alive
    assert alive[-1], "a writer that is made once this one is gone must not lose its saves to it"
    with pytest.raises(PeerError, match="KeyboardInterrupt"):
        trainer.save(2, state(2), new=False)
    link.kill()
    assert link.close(30)
    assert [type(each) for each in trainer.answers] == [Taken, Died]
    assert hooked == [KeyboardInterrupt]


def test_what_a_callback_raises_is_reported_and_the_answers_after_it_are_heard(
    start: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: hooked.append(arguments.exc_type))
    store = MemoryStore()
    trainer = start(store, new_generation(store))
    assert isinstance(trainer.link, ThreadWriter)
    hear = trainer.link._heard

    def heard(answer: Answer) -> None:
        hear(answer)
        if isinstance(answer, Taken):
            raise SystemExit

    monkeypatch.setattr(trainer.link, "_heard", heard)
    trainer.save(1, state(1))
    assert isinstance(trainer.outcome(1), Committed)
    assert hooked == [SystemExit]


LEAVING = """
import sys
import threading
from resilient.catalog.generations import read_claim
from resilient.store.local import LocalStore
from resilient.writer.in_thread import ThreadWriter
from resilient.writer.messages import Died, Taken
from tests.writer.staging import Trainer, opened, state

store = LocalStore(sys.argv[1])
trainer = Trainer(read_claim(store, 1))
first = opened(store, trainer.claim)
trainer.has(lambda heard: ThreadWriter(store, first, trainer.slots, heard))
if "hangs" in sys.argv:
    store.put = lambda *_: threading.Event().wait()
trainer.save(1, state(1))
if "hangs" in sys.argv:
    trainer.wait(Taken)
    trainer.link.kill()
    trainer.wait(Died)
"""


def test_a_program_that_ends_without_waiting_gets_its_save(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    new_generation(store)
    subprocess.run([sys.executable, "-c", LEAVING, store.url], check=True, timeout=60)
    is_step(store, 1, state(1))


def test_a_program_whose_writer_hangs_and_was_left_behind_ends(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    new_generation(store)
    subprocess.run([sys.executable, "-c", LEAVING, store.url, "hangs"], check=True, timeout=30)
    assert not read_line(store).commits


def assert_waited(event: threading.Event) -> None:
    assert event.wait(30)
