"""A store that cannot create an object only if it is absent: names are unique, and what was written is read back.

One launch at a time is safe there, whatever fails. `resilient doctor` says what is not.
"""

from __future__ import annotations

from itertools import count as counting

import pytest

from resilient.catalog.line import read_line
from resilient.catalog.once import create_once
from resilient.errors import CorruptError, NotFoundError, StoreError
from resilient.format.layout import parse_attempt
from resilient.store.base import Capabilities, Store
from resilient.store.memory import MemoryStore
from resilient.store.open import open_store
from resilient.testing.faulty_store import Crashed, Fault, FaultyStore, Mode
from resilient.testing.invariants import check_run
from tests.catalog.runs import HandClock, attempt_of, commit_of, new_generation, save, tensors_of


class LooksFirst(MemoryStore):
    """Looks whether an object is there, and then writes it, as fsspec does."""

    capabilities = Capabilities(conditional_create=False, atomic_put=True, ranged_read=True)

    def create(self, key: str, data: bytes) -> bool:
        try:
            return self.get(key) == data
        except NotFoundError:
            self.put(key, [data])
            return self.get(key) == data


def launches(store: Store, committed: list[int]) -> None:
    """Two launches after one another: the second goes back to step 1, and saves step 2 again."""
    first = new_generation(store, launch="a")
    for step in (1, 2):
        save(store, first, step)
        committed.append(step)
    start = read_line(store).at(1)
    committed[:] = [1]  # from here on: it is decided as soon as the base is stored, whatever the caller hears of that
    second = new_generation(store, start, launch="b")
    save(store, second, 2)
    committed.append(2)


@pytest.mark.parametrize("mode", [Mode.FAIL, Mode.FAIL_FOR_GOOD, Mode.LOSE_RESPONSE, Mode.CRASH, Mode.TEAR])
def test_one_launch_at_a_time_is_safe_whatever_operation_fails(mode: Mode) -> None:
    fired = 0
    for number in counting(1):
        faulty = FaultyStore(LooksFirst(), Fault(mode=mode, at=number))
        committed: list[int] = []
        try:
            launches(open_store(faulty, clock=HandClock()), committed)
        except (StoreError, Crashed):
            assert mode in {Mode.FAIL_FOR_GOOD, Mode.CRASH}, "the others are tried again"
        found = check_run(
            faulty.inner,
            at_least=max(committed, default=None),
            expected=lambda step: {f"model.{name}": array for name, array in tensors_of(step).items()},
        )
        assert found == [], f"operation {number}: {faulty.operations[-1]}"
        if not faulty.fired:
            break
        fired += 1
    assert committed == [1, 2]
    assert fired > 20


def test_two_launches_never_write_an_object_of_one_name() -> None:
    """Both believe that they have won: what each saves is its own all the same, and one of them counts."""
    store = LooksFirst()
    claims = [new_generation(store, launch="a"), new_generation(store, launch="b")]
    attempts = {save(store, claim, 1) for claim in claims}
    keys = [key for key in store.list("steps/") if (parsed := parse_attempt(key)) and parsed[0] in attempts]
    assert len(attempts) == 2
    assert all(sum(key.startswith(attempt.prefix) for key in keys) >= 3 for attempt in attempts)
    assert check_run(store, at_least=1) == []


def test_whoever_is_overwritten_learns_of_it_when_it_reads_back() -> None:
    class Overtaken(LooksFirst):
        """Another writer looked before this one wrote, and writes after it."""

        def create(self, key: str, data: bytes) -> bool:
            won = super().create(key, data)
            self.put(key, [b"theirs"])
            return won

    assert not create_once(Overtaken(), "claim", b"mine")


def test_a_commit_that_was_overwritten_is_not_reported_as_ours() -> None:
    store = LooksFirst()
    claim = new_generation(store, launch="a")
    save(store, claim, 1)

    class Overtaken(LooksFirst):
        def __init__(self) -> None:
            super().__init__()
            self._objects = store._objects

        def create(self, key: str, data: bytes) -> bool:
            won = super().create(key, data)
            if key.endswith("COMMIT"):
                self.put(key, [store.get(attempt_of(claim, 1).commit)])  # somebody else's document, and a whole one
            return won

    overtaken = Overtaken()
    attempt = save(overtaken, claim, 2, commit=False)
    with pytest.raises(CorruptError, match="describes step 1"):
        commit_of(overtaken, attempt)
