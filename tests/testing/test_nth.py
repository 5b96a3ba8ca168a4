"""The driver counts right, names what broke, and takes no failure for a success."""

from __future__ import annotations

import pytest

from resilient.catalog.line import read_line
from resilient.store.base import Store
from resilient.store.memory import MemoryStore
from resilient.store.retrying import Retrying
from resilient.testing import Fault, FaultyStore, Mode, Scenario, fail_each_operation
from resilient.testing.nth import Report, title
from tests.catalog import runs

FOR_GOOD = Fault(mode=Mode.FAIL_FOR_GOOD)
PASSING = Fault(mode=Mode.FAIL)


def prepare(store: Store) -> int:
    runs.save(store, runs.new_generation(store), 1)
    return 1


def restart(store: Store) -> int:
    newest = read_line(store).commits[0]
    runs.save(store, runs.new_generation(store, newest), newest.step + 1)
    return newest.step + 1


def writes(store: Store, report: Report) -> None:
    for number in range(10):
        store.put(f"control/{number}", [b"x"])
    report(1)


def test_every_operation_is_tried_in_every_way_until_none_is_left() -> None:
    scenario = Scenario(prepare=prepare, act=writes, restart=restart)
    away = Fault(mode=Mode.FAIL, times=None)
    assert fail_each_operation(MemoryStore, scenario, faults=[FOR_GOOD, PASSING, away, Fault(mode=Mode.CRASH)]) == {
        "fail-for-good": 10,
        "fail": 10,
        "fail from then on": 10,
        "crash": 10,
    }
    assert fail_each_operation(MemoryStore, scenario, faults=[Fault(mode=Mode.SHORT_READ)]) == {"short-read": 0}


def test_a_sample_is_spread_over_all_operations() -> None:
    hit: list[str] = []

    def act(store: Store, report: Report) -> None:
        try:
            writes(store, report)
        finally:
            assert isinstance(store, Retrying)
            assert isinstance(store.inner, FaultyStore)
            hit.append(store.inner.operations[-1].key)

    scenario = Scenario(prepare=prepare, act=act, restart=restart)
    assert fail_each_operation(MemoryStore, scenario, faults=[FOR_GOOD], most=2) == {"fail-for-good": 2}
    assert hit == ["control/9", "control/0", "control/5"]


def test_what_was_reported_and_is_not_there_is_found_and_named() -> None:
    def act(store: Store, report: Report) -> None:
        report(2)

    with pytest.raises(AssertionError, match="step 2 was reported as saved, and step 1 is the newest") as caught:
        fail_each_operation(MemoryStore, Scenario(prepare=prepare, act=act, restart=restart))
    assert caught.value.__notes__ == ["without any fault"]


def test_a_fault_that_passes_may_not_be_noticed() -> None:
    def impatient(store: Store, report: Report) -> None:
        assert isinstance(store, Retrying)
        writes(store.inner, report)

    scenario = Scenario(prepare=prepare, act=impatient, restart=restart)
    with pytest.raises(AssertionError, match="nothing happened that stays, and it failed") as caught:
        fail_each_operation(MemoryStore, scenario, faults=[PASSING])
    assert caught.value.__notes__ == ["with fault 'fail' at operation 1 that it can hit: put of 'control/0'"]
    assert fail_each_operation(MemoryStore, scenario, faults=[FOR_GOOD]) == {"fail-for-good": 10}


def test_a_step_that_is_silently_not_saved_is_found() -> None:
    def careless(store: Store, report: Report) -> None:
        assert isinstance(store, Retrying)
        try:
            store.inner.put("control/0", [b"x"])
        except OSError:
            return
        report(1)

    with pytest.raises(AssertionError, match=r"reported are steps \[\] instead of \[1\]"):
        fail_each_operation(MemoryStore, Scenario(prepare=prepare, act=careless, restart=restart), faults=[PASSING])


def test_what_is_no_error_of_the_library_is_a_failure() -> None:
    def act(store: Store, report: Report) -> None:
        raise KeyError("a bug of the test, or of the library")

    with pytest.raises(KeyError):
        fail_each_operation(MemoryStore, Scenario(prepare=prepare, act=act, restart=restart))


def test_a_next_life_that_cannot_save_is_found() -> None:
    def stuck(store: Store) -> int:
        return 2

    with pytest.raises(AssertionError, match=r"after the next life has saved: .* step 2 was reported"):
        fail_each_operation(MemoryStore, Scenario(prepare=prepare, act=writes, restart=stuck))


def test_titles_tell_faults_apart() -> None:
    assert title(Fault(mode=Mode.DENIED, verbs={"list", "folders"}, times=None)) == (
        "denied of folders or list from then on"
    )
