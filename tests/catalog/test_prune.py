"""G11: retention never removes the last good state, a pinned one, or one being read."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest

from resilient.catalog import process
from resilient.catalog.commit import write_receipt
from resilient.catalog.generations import claim_generation, write_base
from resilient.catalog.inventory import COMMITTED, take_inventory
from resilient.catalog.line import read_line
from resilient.catalog.marks import FAILED, GOOD, PINNED, USER, reading, write_mark
from resilient.catalog.parallel import each
from resilient.catalog.prune import Pruned, prune, retained
from resilient.catalog.verify import verify
from resilient.clock import SYSTEM_CLOCK
from resilient.errors import ConflictError, ErrorKind, NotFoundError, StoreError
from resilient.format import layout
from resilient.format.chunks import Chunk, Chunks
from resilient.format.documents import Claim, Commit, Object, encode_document
from resilient.format.frame import seal_json
from resilient.policy.keep import Keep
from resilient.store.memory import MemoryStore
from resilient.store.open import open_store
from tests.catalog.runs import HandClock, ReceiptMaker, attempt_of, commit_of, new_generation, save


def a_run(*steps: int) -> tuple[MemoryStore, Claim]:
    store = MemoryStore()
    claim = new_generation(store)
    for step in steps:
        save(store, claim, step)
    return store, claim


def pruned(store: MemoryStore, *keep: int, grace_s: float | None = 0.0, dry_run: bool = False) -> Pruned:
    return prune(store, read_line(store), set(keep), clock=HandClock(), grace_s=grace_s, dry_run=dry_run)


def steps(store: MemoryStore) -> list[int]:
    return [commit.step for commit in read_line(store).commits]


def keys_of(store: MemoryStore, claim: Claim, step: int) -> list[str]:
    name = f"{step:012d}"
    return sorted(key for key in store.list("") if name in key and claim.nonce in key)


def test_what_is_not_kept_goes_with_all_it_stored_and_the_rest_stays_whole() -> None:
    store, claim = a_run(1, 2, 3, 4)
    done = pruned(store, 4, 2)
    assert sorted(done.steps) == [1, 3]
    assert steps(store) == [4, 2]
    for step in (1, 3):
        assert keys_of(store, claim, step) == [attempt_of(claim, step).tombstone]
    line = read_line(store)
    assert verify(store, line.commits, deep=True, line=line).ok
    assert pruned(store, 4, 2) == Pruned(steps=(), held=(), debris=0, nbytes=0, swept=0)


@pytest.mark.parametrize("keep", [(), (1,), (99,)])
def test_the_newest_is_never_removed(keep: tuple[int, ...]) -> None:
    store, _ = a_run(1, 2, 3)
    pruned(store, *keep)
    assert steps(store)[0] == 3


def test_a_dry_run_changes_nothing() -> None:
    store, _ = a_run(1, 2, 3)
    before = {key: store.get(key) for key in store.list("")}
    done = pruned(store, dry_run=True)
    assert sorted(done.steps) == [1, 2]
    assert done.nbytes > 0
    assert {key: store.get(key) for key in store.list("")} == before


def test_data_goes_in_a_later_pass_so_that_readers_without_write_access_can_finish() -> None:
    store, claim = a_run(1, 2)
    pruned(store, grace_s=None)
    assert steps(store) == [2]
    assert attempt_of(claim, 1).data(0, 0) in store.list("data/")
    save(store, claim, 3)
    assert pruned(store, grace_s=None).swept == 1
    assert keys_of(store, claim, 1) == [attempt_of(claim, 1).tombstone]
    assert attempt_of(claim, 2).data(0, 0) in store.list("data/")


def test_grace_is_waited_for_between_the_tombstone_and_the_data() -> None:
    store, claim = a_run(1, 2)
    clock = HandClock()
    prune(store, read_line(store), set(), clock=clock, grace_s=90)
    assert clock.slept == [90]
    assert keys_of(store, claim, 1) == [attempt_of(claim, 1).tombstone]


def test_a_pinned_one_is_kept_and_said() -> None:
    store, claim = a_run(1, 2, 3)
    store.put(attempt_of(claim, 1).mark("pinned", "release"), [b""])
    done = pruned(store)
    assert done.steps == (2,)
    assert [(held.step, held.why) for held in done.held] == [(1, "pinned")]
    assert steps(store) == [3, 1]


def test_one_being_read_is_kept_until_it_is_read() -> None:
    store, _ = a_run(1, 2)
    with reading(store, read_line(store).at(1)):
        assert [held.why for held in pruned(store).held] == ["being read"]
        assert steps(store) == [2, 1]
    assert pruned(store).steps == (1,)


def test_a_reader_that_began_before_the_tombstone_keeps_its_data() -> None:
    store, claim = a_run(1, 2)
    commit = read_line(store).at(1)
    with reading(store, commit):
        store.create(commit.attempt.tombstone, b"")  # a pruner that had looked at the marks a moment before
        pruned(store)
        assert attempt_of(claim, 1).data(0, 0) in store.list("data/")
    pruned(store)
    assert attempt_of(claim, 1).data(0, 0) not in store.list("data/")


def test_a_reader_that_comes_after_the_tombstone_is_told() -> None:
    store, _ = a_run(1, 2)
    commit = read_line(store).at(1)
    pruned(store, grace_s=None)
    with pytest.raises(NotFoundError, match="being deleted"), reading(store, commit):
        pass


def test_reading_where_one_may_not_write_needs_no_mark() -> None:
    class ReadOnly(MemoryStore):
        def put(self, key, parts):  # type: ignore[no-untyped-def]
            raise StoreError("denied", kind=ErrorKind.ACCESS_DENIED)

    store, _ = a_run(1)
    read_only = ReadOnly()
    read_only._objects = store._objects
    with reading(read_only, read_line(store).at(1)):
        pass
    assert list(store.list("steps/")) == list(read_only.list("steps/"))


def test_what_earlier_generations_left_unfinished_is_collected_and_what_the_newest_writes_is_not() -> None:
    store, first = a_run(1, 2)
    save(store, first, 3, commit=False)
    orphan = attempt_of(first, 4)
    store.put(orphan.data(0, 0), [b"killed before its receipt"])
    second = new_generation(store, read_line(store).at(1))  # a rollback: step 2 is off the line
    save(store, second, 5)
    save(store, second, 6, commit=False)
    store.put(attempt_of(second, 7).data(0, 0), [b"being written"])
    done = pruned(store, 1, 5)
    assert (done.steps, done.debris) == ((), 3)
    assert steps(store) == [5, 1]
    for step in (2, 3, 4):
        assert keys_of(store, first, step) == [attempt_of(first, step).tombstone]
    assert len(keys_of(store, second, 6)) > 3
    assert len(keys_of(store, second, 7)) == 1


def test_what_a_generation_continues_from_is_not_debris_even_unfinished() -> None:
    store, first = a_run(1)
    save(store, first, 2)
    second = new_generation(store, read_line(store).at(2))
    store.delete(attempt_of(first, 2).commit)  # as if its writer, which outlives the trainer, were not done yet
    save(store, second, 3)
    pruned(store, 3, 2, 1)
    assert len(keys_of(store, first, 2)) > 3


def test_nothing_is_debris_while_documents_of_the_line_are_damaged() -> None:
    store, first = a_run(1, 2)
    save(store, new_generation(store, read_line(store).at(2)), 3)
    store.put("generations/00000002.base.json", [b""])
    assert pruned(store).debris == 0
    assert len(keys_of(store, first, 1)) > 3


def test_a_pruner_whose_line_is_outdated_deletes_nothing() -> None:
    store, _ = a_run(1, 2, 3)
    line = read_line(store)
    new_generation(store, line.at(1))  # falls back to the step that the other one is about to delete
    with pytest.raises(ConflictError) as caught:
        prune(store, line, {3}, clock=SYSTEM_CLOCK, grace_s=0)
    assert caught.value.kind is ErrorKind.TAKEN_OVER
    assert steps(store) == [1]


def test_a_pruner_deletes_nothing_while_a_newer_generation_chooses_where_to_continue() -> None:
    store, _ = a_run(1, 2, 3)
    claim = claim_generation(store, world_size=1, launch="b", heartbeat=False)  # of this process, which lives
    with pytest.raises(ConflictError) as caught:
        pruned(store, 3)
    assert caught.value.kind is ErrorKind.TAKEN_OVER
    assert steps(store) == [3, 2, 1]
    write_base(store, claim, read_line(store).at(3))
    assert sorted(pruned(store, 3).steps) == [1, 2]


def test_a_process_that_died_before_it_chose_does_not_stop_pruning() -> None:
    store, _ = a_run(1, 2, 3)
    claim = claim_generation(store, world_size=1, launch="b", heartbeat=False)
    dead = {name: getattr(claim, name) for name in claim.__slots__} | {"pid": 2**22 + 1}
    store.put(layout.claim(2), [encode_document(Claim(**dead))])
    assert sorted(pruned(store, 3).steps) == [1, 2]


def test_on_a_full_disk_what_was_given_up_goes_before_more_is_given_up() -> None:
    class Full(MemoryStore):
        full = False

        def create(self, key: str, data: bytes) -> bool:
            if self.full:
                raise StoreError("full", kind=ErrorKind.NO_SPACE)
            return super().create(key, data)

        def delete(self, key: str) -> None:
            self.full = False
            super().delete(key)

    store = Full()
    claim = new_generation(store)
    for step in (1, 2, 3):
        save(store, claim, step)
    prune(store, read_line(store), {2, 3}, clock=HandClock())
    store.full = True
    done = prune(store, read_line(store), {3}, clock=HandClock())
    assert (done.steps, done.swept) == ((2,), 1)


def test_a_pruner_killed_at_any_operation_leaves_the_kept_ones_whole_and_the_next_one_goes_on() -> None:
    class Killed(Exception):  # noqa: N818
        pass

    class Mortal(MemoryStore):
        left = 10**9

        def _spend(self) -> None:
            self.left -= 1
            if self.left < 0:
                raise Killed

        def create(self, key: str, data: bytes) -> bool:
            self._spend()
            return super().create(key, data)

        def delete(self, key: str) -> None:
            self._spend()
            super().delete(key)

    for budget in range(100):
        store = Mortal()
        claim = new_generation(store)
        for step in (1, 2, 3):
            save(store, claim, step)
        store.left = budget
        killed = False
        try:
            pruned(store, 3)
        except Killed:
            killed = True
        store.left = 10**9
        line = read_line(store)
        assert line.commits[0].step == 3
        assert verify(store, line.commits, deep=True, line=line).ok, f"killed after {budget} operations"
        pruned(store, 3)
        assert keys_of(store, claim, 1) == [attempt_of(claim, 1).tombstone]
        assert keys_of(store, claim, 2) == [attempt_of(claim, 2).tombstone]
        if not killed:
            return
    raise AssertionError("it never ran to its end")


def mark(store: MemoryStore, claim: Claim, step: int, kind: str) -> None:
    write_mark(store, attempt_of(claim, step), kind, by=USER, why="", clock=HandClock())


def test_the_last_good_one_is_never_removed_however_many_newer_ones_are_marked_failed() -> None:
    class Unlisted(MemoryStore):
        def list(self, prefix):  # type: ignore[no-untyped-def]
            return (key for key in super().list(prefix) if "/marks/" not in key)

    for kind in (MemoryStore, Unlisted):
        store = kind()
        claim = new_generation(store)
        for step in (1, 2, 3, 4, 5):
            save(store, claim, step)
        for step in (3, 4, 5):
            mark(store, claim, step, FAILED)
        assert sorted(pruned(store, 5).steps) == [1, 3, 4]
        assert steps(store) == [5, 2]
        mark(store, claim, 5, GOOD)
        assert pruned(store, 5).steps == (2,)


def test_a_pin_that_no_listing_shows_is_honored() -> None:
    class Unlisted(MemoryStore):
        def list(self, prefix):  # type: ignore[no-untyped-def]
            return (key for key in super().list(prefix) if "/marks/" not in key)

    store = Unlisted()
    claim = new_generation(store)
    for step in (1, 2):
        save(store, claim, step)
    mark(store, claim, 1, PINNED)
    assert pruned(store, 2).held[0].why == "pinned"
    assert steps(store) == [2, 1]


@pytest.mark.field_report("BR-148")
@pytest.mark.field_report("BR-153")
def test_what_the_newest_generation_could_not_commit_goes_after_two_later_steps() -> None:
    store, claim = a_run(1)
    save(store, claim, 2, commit=False)
    store.put(attempt_of(claim, 3).data(1, 0), [b"the other rank was killed"])
    save(store, claim, 4)
    assert pruned(store, 4, 1).debris == 0  # a rank of another machine may still be at it
    save(store, claim, 5)
    save(store, claim, 6, commit=False)
    store.put(attempt_of(claim, 7).data(0, 0), [b"being written"])
    assert pruned(store, 5, 4, 1).debris == 2
    for step in (2, 3):
        assert keys_of(store, claim, step) == [attempt_of(claim, step).tombstone]
    assert len(keys_of(store, claim, 6)) > 3
    assert len(keys_of(store, claim, 7)) == 1
    assert steps(store) == [5, 4, 1]


def test_a_commit_that_no_listing_shows_yet_is_no_debris() -> None:
    class Stale(MemoryStore):
        hidden = ""

        def list(self, prefix):  # type: ignore[no-untyped-def]
            return (key for key in super().list(prefix) if key != self.hidden)

    store = Stale()
    claim = new_generation(store)
    for step in range(1, 7):
        save(store, claim, step)
    store.hidden = attempt_of(claim, 1).commit
    assert pruned(store, 6, 5, 4, 3, 2).debris == 0
    second = new_generation(store, read_line(store).at(6))
    for step in (7, 8):
        save(store, second, step)
    assert pruned(store, *range(2, 9)).debris == 0
    store.hidden = ""
    assert steps(store) == [8, 7, 6, 5, 4, 3, 2, 1]


def test_signs_of_dead_readers_and_launches_go_and_those_of_the_living_stay() -> None:
    def sign(**changes: object) -> bytes:
        me = {"host": process.host(), "pid": os.getpid(), "process_started": process.started(os.getpid())}
        return seal_json({**me, "interval_s": 1.0, "seen": "", "count": 0, "ended": False, **changes})

    def moving() -> None:
        store.put(layout.heartbeat("elsewhere"), [sign(host="another", count=clock.elapsed_s)])

    class Told(HandClock):
        def sleep(self, duration_s: float) -> None:
            super().sleep(duration_s)
            moving()

    clock = Told()
    store, claim = a_run(1, 2)
    for launch in ("b", "c", "d"):
        new_generation(store, read_line(store).at(2), launch=launch, heartbeat=True)
    dead = {"pid": 2**22 + 1}
    for launch, content in (
        ("old", sign(**dead)),
        ("lives", sign()),
        ("silent", sign(host="another")),
        ("d", sign(**dead)),
    ):
        store.put(layout.heartbeat(launch), [content])
    moving()
    for name, content in (("dead", sign(**dead)), ("lives", sign())):
        store.put(attempt_of(claim, 2).mark("reading", name), [content])
    assert prune(store, read_line(store), {1, 2}, clock=clock).signs == 1  # the reader: launches are only watched for
    assert prune(store, read_line(store), {1, 2}, clock=clock, watch=True).signs == 2
    left = [key.rpartition("launch-")[2] for key in store.list("control/")]
    assert sorted(left) == ["d", "elsewhere", "lives"]
    marks = [key for key in store.list(attempt_of(claim, 2).marks) if "reading-" in key]
    assert marks == [attempt_of(claim, 2).mark("reading", "lives")]


@pytest.mark.field_report("BR-149")
@pytest.mark.field_report("BR-156")
def test_whatever_is_pinned_marked_read_and_saved_the_last_good_and_the_held_ones_stay(
    count: Callable[[int, int], int],
) -> None:
    for seed in range(count(40, 2000)):
        draw = random.Random(seed)
        store, claim = a_run()
        newest = draw.randint(1, 12)
        for step in range(1, newest + 1):
            save(store, claim, step, world_size=1, commit=step == newest or draw.random() < 0.8)
        counted = steps(store)
        failed = {step for step in counted if draw.random() < 0.4}
        pins = {step for step in counted if draw.random() < 0.2}
        read = {step for step in counted if draw.random() < 0.2}
        policy = Keep(last=draw.randint(1, 3), every=draw.choice([None, 2, 5]))
        for step in failed:
            mark(store, claim, step, FAILED)
        for step in pins:
            mark(store, claim, step, PINNED)
        with ExitStack() as readers:
            for step in read:
                readers.enter_context(reading(store, read_line(store).at(step)))
            line = read_line(store)
            for _ in range(2):  # two pruners that have read the same line: the second finds half of it gone
                prune(store, line, retained(line, policy), clock=HandClock(), grace_s=0)
            after = set(steps(store))
            good = [step for step in counted if step not in failed]
            must = {counted[0], *good[: policy.last], *pins, *read}
            must |= {step for step in counted if policy.every and step % policy.every == 0}
            assert must <= after, f"seed {seed}: {sorted(must - after)} are gone"
            assert after <= must | set(counted[: policy.last]), f"seed {seed}: {sorted(after)} stay"
            line = read_line(store)
            assert verify(store, line.commits, deep=True, line=line).ok, f"seed {seed}"


@pytest.mark.s3
@pytest.mark.field_report("BR-031")
def test_a_step_of_thousands_of_objects_is_verified_and_removed_whole(s3_url: str) -> None:
    count = 2_500
    store = open_store(s3_url)
    claim = new_generation(store)
    attempt = attempt_of(claim, 1)
    maker = ReceiptMaker(attempt)
    for number in range(count):
        maker.tensor(f"t{number}", np.full(2, number, dtype=np.int32))
    receipt = maker.receipt()
    chunks = [Chunk(number, (0,), (2,), number, 0, 8, chunk.digest) for number, chunk in enumerate(receipt.chunks)]
    objects = tuple(Object(attempt.data(0, number), 8) for number in range(count))
    each(lambda number: store.put(objects[number].key, [maker.data[number]]), list(range(count)))
    write_receipt(store, msgspec.structs.replace(receipt, objects=objects, chunks=Chunks.of(chunks)))
    assert isinstance(commit_of(store, attempt, world_size=1), Commit)

    line = read_line(store)
    assert verify(store, line.commits, deep=False).checked >= count
    assert take_inventory(store, line).amounts[COMMITTED].objects >= count
    store.delete(objects[-1].key)
    assert [bad.object for bad in verify(store, line.commits, deep=False).bad] == [objects[-1].key]
    save(store, claim, 2)
    prune(store, read_line(store), {2}, clock=HandClock(), grace_s=0.0)
    of_step = [key for key in store.list("") if "000000000001" in key]
    assert of_step == [attempt.tombstone]
