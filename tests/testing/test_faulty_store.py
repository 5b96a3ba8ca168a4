"""Each fault does what it says, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count as counting
from typing import Any

import pytest

from resilient.catalog.once import create_once
from resilient.errors import ErrorKind, NotFoundError, StoreError, UsageError
from resilient.store.base import Capabilities, Store
from resilient.store.memory import MemoryStore
from resilient.store.open import open_store
from resilient.testing.faulty_store import VERBS, Crashed, Fault, FaultyStore, Mode, Operation
from tests.catalog.runs import HandClock


class Tearing(MemoryStore):
    capabilities = Capabilities(conditional_create=True, atomic_put=False, ranged_read=True)


def faulty(*faults: Fault, inner: Store | None = None, clock: Any = None) -> FaultyStore:
    return FaultyStore(inner or MemoryStore(), *faults, clock=clock or HandClock())


CALLS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("a/new", [b"12345678"]),
    "create": lambda store: store.create("a/claim", b"12345678"),
    "get": lambda store: store.get("a/old"),
    "read_into": lambda store: store.read_into("a/old", 0, memoryview(bytearray(8))),
    "size": lambda store: store.size("a/old"),
    "list": lambda store: list(store.list("a/")),
    "folders": lambda store: list(store.folders("")),
    "delete": lambda store: store.delete("a/old"),
}


def filled(inner: MemoryStore | None = None) -> MemoryStore:
    inner = inner or MemoryStore()
    inner.put("a/old", [b"abcdefgh"])
    return inner


def contents(store: Store) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list("")}


def test_without_faults_it_is_the_store_inside() -> None:
    store, same = faulty(inner=filled()), filled()
    for verb, call in CALLS.items():
        assert call(store) == call(same), verb
    assert contents(store.inner) == contents(same)
    assert [operation.verb for operation in store.operations] == list(CALLS)
    assert store.operations[0] == Operation(1, "put", "a/new")
    assert {operation.verb for operation in store.operations} == VERBS
    assert store.fired == 0
    assert isinstance(store, Store)


REFUSALS = {
    Mode.FAIL: (ErrorKind.IO, True),
    Mode.FAIL_FOR_GOOD: (ErrorKind.IO, False),
    Mode.THROTTLE: (ErrorKind.THROTTLED, True),
    Mode.EXPIRED: (ErrorKind.BAD_CREDENTIALS, False),
    Mode.DENIED: (ErrorKind.ACCESS_DENIED, False),
    Mode.HANG: (ErrorKind.DEADLINE, True),
}


@pytest.mark.parametrize("verb", sorted(VERBS))
@pytest.mark.parametrize("mode", REFUSALS, ids=lambda mode: mode.value)
def test_what_is_refused_is_not_done_and_the_next_call_is(mode: Mode, verb: str) -> None:
    store = faulty(Fault(mode=mode), inner=filled())
    before = contents(store.inner)
    with pytest.raises(StoreError, match=mode.value) as caught:
        CALLS[verb](store)
    assert (caught.value.kind, caught.value.retryable) == REFUSALS[mode]
    assert contents(store.inner) == before
    assert CALLS[verb](store) == CALLS[verb](filled())
    assert store.fired == 1


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_what_loses_its_response_is_done(verb: str) -> None:
    store = faulty(Fault(mode=Mode.LOSE_RESPONSE), inner=filled())
    with pytest.raises(StoreError, match="the answer was lost") as caught:
        CALLS[verb](store)
    assert caught.value.retryable
    done = filled()
    CALLS[verb](done)
    assert contents(store.inner) == contents(done)


def test_a_create_that_lost_its_response_recognizes_its_own_write_when_it_is_tried_again() -> None:
    store = faulty(Fault(mode=Mode.LOSE_RESPONSE, verbs=frozenset({"create"})))
    assert create_once(open_store(store, clock=HandClock()), "claim", b"mine")
    assert [operation.verb for operation in store.operations] == ["create", "create"]


def test_no_space_hits_only_what_stores() -> None:
    store = faulty(Fault(mode=Mode.NO_SPACE, times=None), inner=filled())
    for verb, call in CALLS.items():
        if verb in {"put", "create"}:
            with pytest.raises(StoreError) as caught:
                call(store)
            assert (caught.value.kind, caught.value.retryable) == (ErrorKind.NO_SPACE, False)
        else:
            call(store)
    assert contents(store.inner) == {}


def test_operations_are_counted_by_what_matches() -> None:
    fault = Fault(mode=Mode.FAIL, at=2, times=2, verbs=frozenset({"put"}), key="data/*")
    store = faulty(fault)
    outcomes = []
    for key in ("data/a/1", "steps/1", "data/2", "data/3", "steps/2", "data/4"):
        try:
            store.put(key, [b"x"])
            outcomes.append(key)
        except StoreError:
            outcomes.append("failed")
    assert outcomes == ["data/a/1", "steps/1", "failed", "failed", "steps/2", "data/4"]
    assert store.fired == 2


def test_a_caller_can_enumerate_until_nothing_fires() -> None:
    for number in counting(1):
        store = faulty(Fault(mode=Mode.FAIL_FOR_GOOD, at=number), inner=filled())
        failed = []
        for call in CALLS.values():
            try:
                call(store)
            except StoreError as error:
                failed.append(str(error))
        assert len(failed) == store.fired
        assert all(f"operation {number})" in message for message in failed)
        if not store.fired:
            break
    assert number == len(CALLS) + 1


@pytest.mark.parametrize("verb", ["put", "create"])
def test_a_torn_write_leaves_a_part_where_writes_are_not_atomic(verb: str) -> None:
    store = faulty(Fault(mode=Mode.TEAR), inner=filled(Tearing()))
    with pytest.raises(StoreError, match="half-way") as caught:
        CALLS[verb](store)
    assert caught.value.retryable
    assert contents(store.inner) == {"a/old": b"abcdefgh", {"put": "a/new", "create": "a/claim"}[verb]: b"1234"}


def test_a_torn_write_leaves_nothing_where_writes_are_atomic() -> None:
    store = faulty(Fault(mode=Mode.TEAR), inner=filled())
    with pytest.raises(StoreError, match="half-way"):
        store.put("a/old", [b"12345678"])
    assert contents(store.inner) == {"a/old": b"abcdefgh"}


def test_a_torn_create_does_not_touch_what_is_there() -> None:
    store = faulty(Fault(mode=Mode.TEAR), inner=filled(Tearing()))
    with pytest.raises(StoreError, match="half-way"):
        store.create("a/old", b"12345678")
    assert contents(store.inner) == {"a/old": b"abcdefgh"}


def test_what_is_not_durable_is_taken_back_by_a_crash_and_nothing_else_is() -> None:
    fault = Fault(mode=Mode.DROP_UNSYNCED, times=None, key="lost/*")
    store = faulty(fault)
    for folder in ("lost", "kept"):
        store.inner.put(f"{folder}/overwritten", [b"old"])
        store.inner.put(f"{folder}/deleted", [b"old"])
        store.put(f"{folder}/put", [b"new"])
        assert store.create(f"{folder}/created", b"new")
        store.put(f"{folder}/overwritten", [b"newer"])
        store.put(f"{folder}/overwritten", [b"newest"])
        store.delete(f"{folder}/deleted")
        assert store.get(f"{folder}/put") == store.get(f"{folder}/created") == b"new"
    store.crash()
    assert contents(store) == {
        "lost/overwritten": b"old",
        "lost/deleted": b"old",
        "kept/put": b"new",
        "kept/created": b"new",
        "kept/overwritten": b"newest",
    }
    store.crash()
    assert len(contents(store)) == 5


def test_a_durable_write_after_a_lost_one_stays() -> None:
    store = faulty(Fault(mode=Mode.DROP_UNSYNCED))
    store.put("key", [b"lost"])
    store.put("key", [b"kept"])
    store.crash()
    assert store.get("key") == b"kept"


def test_a_stale_listing_is_that_of_an_earlier_moment() -> None:
    store = faulty()
    for index in range(4):
        store.put(f"steps/{index}/COMMIT", [b"x"])
        store.put(f"other/{index}", [b"x"])
    store.put("steps/0/COMMIT", [b"y"])  # an overwrite changes no listing
    store.delete("steps/1/COMMIT")
    store.inject(Fault(mode=Mode.STALE_LIST, times=None, stale_keys=2))
    assert sorted(store.list("steps/")) == [f"steps/{index}/COMMIT" for index in (0, 1, 2)]
    assert sorted(store.folders("steps/")) == ["0", "1", "2"]
    assert sorted(store.list("other/")) == ["other/0", "other/1"]
    assert store.get("steps/3/COMMIT") == b"x", "only listings are stale"
    store.inner.delete("steps/2/COMMIT")  # by others: nobody here knows when
    assert sorted(store.list("steps/")) == ["steps/0/COMMIT", "steps/1/COMMIT"]
    store.inner.put("steps/2/COMMIT", [b"x"])
    store.heal()
    assert sorted(store.folders("steps/")) == ["0", "2", "3"]


def test_what_others_have_stored_is_missing_from_a_stale_listing_too() -> None:
    inner = MemoryStore()
    for index in range(3):
        inner.put(f"steps/{index}", [b"x"])
    store = faulty(Fault(mode=Mode.STALE_LIST), inner=inner)
    assert sorted(store.list("steps/")) == ["steps/0", "steps/1"]
    assert sorted(store.list("steps/")) == ["steps/0", "steps/1", "steps/2"]


def test_a_short_read_lacks_its_second_half_and_nobody_says_so() -> None:
    store = faulty(Fault(mode=Mode.SHORT_READ, times=2), inner=filled())
    assert store.get("a/old") == b"abcd"
    into = bytearray(b"########")
    store.read_into("a/old", 0, memoryview(into))
    assert into == b"abcd####"
    assert store.size("a/old") == 8


def test_a_corrupt_read_differs_in_one_bit_and_always_the_same_one() -> None:
    def bits(store: FaultyStore) -> tuple[list[int], bytes]:
        into = bytearray(8)
        found = store.get("a/old")
        store.read_into("a/old", 0, memoryview(into))
        wrong = [
            sum(byte.bit_count() for byte in (int(x) ^ int(y) for x, y in zip(got, b"abcdefgh", strict=True)))
            for got in (found, into)
        ]
        return wrong, found + into

    fault = Fault(mode=Mode.CORRUPT_READ, times=None)
    wrong, first = bits(faulty(fault, inner=filled()))
    assert wrong == [1, 1]
    assert bits(faulty(fault, inner=filled()))[1] == first
    assert first[:8] != first[8:], "another operation, another bit"
    assert contents(filled()) == {"a/old": b"abcdefgh"}


def test_a_delay_passes_and_then_all_is_well() -> None:
    clock = HandClock()
    store = faulty(Fault(mode=Mode.DELAY, delay_s=7), inner=filled(), clock=clock)
    assert store.get("a/old") == b"abcdefgh"
    assert clock.elapsed_s == 7


def test_what_hangs_fails_at_its_deadline() -> None:
    clock = HandClock()
    store = faulty(Fault(mode=Mode.HANG, delay_s=30), clock=clock)
    with pytest.raises(StoreError, match="no answer in time"):
        store.put("key", [b"x"])
    assert clock.elapsed_s == pytest.approx(30)
    assert contents(store.inner) == {}


@pytest.mark.parametrize("mode", [Mode.HANG, Mode.STALL])
def test_what_hangs_waits_until_it_is_released(mode: Mode) -> None:
    store = FaultyStore(MemoryStore(), Fault(mode=mode, verbs=frozenset({"put"})))
    failures: list[BaseException] = []

    def write() -> None:
        try:
            store.put("key", [b"x"])
        except StoreError as error:
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    while not store.stuck:
        time.sleep(0.001)
    assert contents(store.inner) == {}
    store.put("other", [b"x"])
    assert writer.is_alive()
    store.release()
    writer.join(timeout=30)
    assert not writer.is_alive()
    assert store.stuck == 0
    assert contents(store.inner) == ({"other": b"x"} if mode is Mode.HANG else {"other": b"x", "key": b"x"})
    assert len(failures) == (mode is Mode.HANG)


def test_the_dead_do_nothing_any_more_and_no_handler_of_errors_survives() -> None:
    store = faulty(Fault(mode=Mode.CRASH, at=2), inner=filled())
    store.put("a/new", [b"x"])

    def careless() -> None:
        with suppress(Exception):
            store.put("a/newer", [b"x"])

    with pytest.raises(Crashed):
        careless()
    store.heal()
    for call in CALLS.values():
        with pytest.raises(Crashed):
            call(store)
    assert contents(store.inner) == {"a/old": b"abcdefgh", "a/new": b"x"}
    assert store.fired == 1


def test_what_hangs_when_the_process_dies_is_never_done() -> None:
    store = FaultyStore(
        MemoryStore(),
        Fault(mode=Mode.STALL, verbs=frozenset({"put"})),
        Fault(mode=Mode.CRASH, verbs=frozenset({"delete"})),
    )
    died: list[Crashed] = []

    def write() -> None:
        try:
            store.put("key", [b"x"])
        except Crashed as crash:
            died.append(crash)

    writer = threading.Thread(target=write)
    writer.start()
    while not store.stuck:
        time.sleep(0.001)
    with pytest.raises(Crashed):
        store.delete("other")
    store.release()
    writer.join(timeout=30)
    assert len(died) == 1
    assert contents(store.inner) == {}


def test_healed_and_injected_faults() -> None:
    store = faulty(Fault(mode=Mode.FAIL, times=None))
    for _ in range(3):
        with pytest.raises(StoreError):
            store.put("key", [b"x"])
    store.heal()
    store.put("key", [b"x"])
    store.inject(Fault(mode=Mode.FAIL, at=2))
    store.get("key")
    with pytest.raises(StoreError):
        store.get("key")


def test_faults_of_several_threads_fire_as_often_as_they_should() -> None:
    store = FaultyStore(filled(), Fault(mode=Mode.FAIL, at=51, times=100))
    failed: list[int] = []

    def use() -> None:
        for _ in range(50):
            try:
                store.get("a/old")
            except StoreError:
                failed.append(1)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failed) == store.fired == 100
    assert sorted(operation.number for operation in store.operations) == list(range(1, 401))


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": Mode.FAIL, "at": 0},
        {"mode": Mode.FAIL, "times": 0},
        {"mode": Mode.DELAY, "delay_s": -1},
        {"mode": Mode.FAIL, "verbs": frozenset({"putt"})},
        {"mode": Mode.SHORT_READ, "verbs": frozenset({"put"})},
    ],
)
def test_a_fault_that_could_never_fire_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Fault(**wrong)


def test_what_is_missing_is_missing_without_any_fault() -> None:
    with pytest.raises(NotFoundError):
        faulty().get("nothing")
