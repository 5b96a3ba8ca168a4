"""What is done to a run while its store fails: saves, retention, restores, copies, adoptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from resilient.catalog.adopt import adopt
from resilient.catalog.copy import copy
from resilient.catalog.line import read_line
from resilient.catalog.marks import PINNED, USER, is_pinned, mark_commit
from resilient.catalog.prune import prune
from resilient.engine.peers import Peers
from resilient.engine.restore import RestoredFrom, restore
from resilient.errors import ResilientError
from resilient.events import Bus
from resilient.format import layout
from resilient.policy.keep import Keep
from resilient.store.base import Store
from resilient.store.memory import MemoryStore
from resilient.store.retrying import Retrying
from resilient.testing import Crashed, FaultyStore, Scenario, check_run
from resilient.testing.nth import Report
from tests.catalog import runs
from tests.catalog.runs import HandClock
from tests.crash.two_ranks import SIZE, TwoRanks, arrays_of, content, expected, go_on, replay, saved_run
from tests.engine.rank_threads import SharedValues

TIMEOUT_S = 20.0


def prepared(objects: Mapping[str, bytes], newest: int) -> Callable[[Store], int]:
    def prepare(store: Store) -> int:
        replay(dict(objects), store)
        return newest

    return prepare


# --- saving -----------------------------------------------------------------------------------------------------------


def first_save() -> Scenario:
    """The place is empty: it becomes a run."""

    def act(store: Store, report: Report) -> None:
        life = TwoRanks(store)
        life.save(1, report=report)
        life.close()

    return Scenario(act=act, restart=go_on, expected=expected)


def later_save() -> Scenario:
    """A new life goes on from what an earlier one has saved."""
    before = saved_run(1)

    def act(store: Store, report: Report) -> None:
        life = TwoRanks(store)
        life.save(2, report=report)
        life.close()

    return Scenario(prepare=prepared(before, 1), act=act, restart=go_on, expected=expected)


def overlapping_saves() -> Scenario:
    """Two saves are in flight; the later ones refer to the first one's data, which retention gives up meanwhile."""
    before = saved_run(1)
    keep = Keep(last=1)

    def act(store: Store, report: Report) -> None:
        life = TwoRanks(store, keep=keep)
        life.save(2, 3, 4, report=report, overlapping=True)
        life.close()

    return Scenario(
        prepare=prepared(before, 1), act=act, restart=lambda store: go_on(store, keep=keep), expected=expected
    )


# --- retention --------------------------------------------------------------------------------------------------------


@cache
def _to_prune() -> Mapping[str, bytes]:
    store = MemoryStore()
    replay(saved_run(1, 2, 3, 4, 5), store)
    commit = read_line(store).at(2)
    mark_commit(store, commit, PINNED, by=USER, why="test", clock=HandClock())
    return content(store)


def retention() -> Scenario:
    """Of five steps the first, to which the others refer, and two more go; one that is pinned stays."""

    def act(store: Store, report: Report) -> None:
        for _ in range(2):  # first the TOMBSTONEs, then the data
            prune(store, read_line(store), {5}, clock=HandClock())

    def restart(store: Store) -> int:
        line = read_line(store)
        pinned = line.at(2).attempt
        assert is_pinned(store, pinned) is not None
        assert line.commits[0].step == 5
        doomed = [commit.attempt for commit in line.commits if commit.step in {1, 3, 4}]
        step = go_on(store)
        for _ in range(2):
            prune(store, read_line(store), {5, step}, clock=HandClock(), grace_s=0.0)
        line = read_line(store)
        assert [commit.step for commit in line.commits] == [step, 5, 2]
        kept = {commit.attempt for commit in line.commits}
        left = {layout.parse_data(key) for key in store.list(layout.DATA)} - kept
        # Nothing stays behind but the full save to which those that stay refer.
        assert {attempt.step for attempt in left if attempt is not None} <= {1}, (left, doomed)
        return step

    return Scenario(prepare=prepared(_to_prune(), 5), act=act, restart=restart, expected=expected)


# --- restoring --------------------------------------------------------------------------------------------------------


class Mortal(SharedValues):
    """A key-value store of ranks that die together, with the process of one of them."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store.inner if isinstance(store, Retrying) else store

    def check(self, keys: list[str]) -> bool:
        if isinstance(self._store, FaultyStore) and self._store._dead:
            raise Crashed("another rank has died")
        return super().check(keys)


def restored(store: Store, rank: int, values: Mortal) -> int:
    """Restore on one rank; return the step, having compared every byte."""
    into = {name: torch.full(array.shape, -7.0) for name, array in _all_arrays(0).items()}
    items: dict[str, Any] = {"model": {**into, "step": -1}}
    found = restore(store, items, Peers(rank, SIZE, values), resume="required", bus=Bus(), timeout_s=TIMEOUT_S)
    assert isinstance(found, RestoredFrom)
    step = found.commit.step
    assert items["model"]["step"] == step
    for name, array in _all_arrays(step).items():
        assert items["model"][name].numpy().tobytes() == array.tobytes(), f"{name} of step {step} is wrong"
    return step


def _all_arrays(step: int) -> dict[str, Any]:
    return {name: array for rank in range(SIZE) for name, array in arrays_of(rank, step).items()}


def restoring() -> Scenario:
    """Two ranks restore together; the newest step refers to data of the one before."""
    before = saved_run(1, 2)

    def act(store: Store, report: Report) -> None:
        values = Mortal(store)
        with ThreadPoolExecutor(SIZE) as pool:
            ranks = [pool.submit(restored, store, rank, values) for rank in range(SIZE)]
        errors = [each.exception() for each in ranks]
        for error in sorted(filter(None, errors), key=lambda one: isinstance(one, ResilientError)):
            raise error  # one that should not be comes first
        (step,) = {each.result() for each in ranks}
        report(step)

    return Scenario(prepare=prepared(before, 2), act=act, restart=go_on, expected=expected)


# --- copying and adopting ---------------------------------------------------------------------------------------------


@cache
def _source() -> MemoryStore:
    store = MemoryStore()
    replay(saved_run(1, 2), store)
    return store


def copying_to() -> Scenario:
    """The destination fails."""

    def act(store: Store, report: Report) -> None:
        report(copy(_source(), read_line(_source()).at(2), store, clock=HandClock()).step)

    def restart(store: Store) -> int:
        # ``prepare`` makes no run: killed before that, there is none.
        if not read_line(store).commits:
            copy(_source(), read_line(_source()).at(2), store, clock=HandClock())
        return go_on(store)

    return Scenario(act=act, restart=restart, expected=expected)


def copying_from() -> Scenario:
    """The source fails: the destination has all of it or nothing."""
    before = saved_run(1, 2)

    def act(store: Store, report: Report) -> None:
        there = MemoryStore()
        made = False
        try:
            step = copy(store, read_line(store).at(2), there, clock=HandClock()).step
            made = True
        finally:
            assert check_run(there, at_least=2 if made else None, expected=expected) == []
            assert bool(read_line(there).commits) == made
        report(step)

    return Scenario(prepare=prepared(before, 2), act=act, restart=go_on, expected=expected)


@cache
def _to_adopt() -> Mapping[str, bytes]:
    store = MemoryStore()
    claim = runs.dead_generation(store)
    runs.save(store, claim, 1)
    runs.save(store, claim, 2, commit=False)
    return content(store)


def adopting() -> Scenario:
    """A save is complete, and all its writers are dead."""

    def act(store: Store, report: Report) -> None:
        report(adopt(store, 2, clock=HandClock()).step)

    def restart(store: Store) -> int:
        newest = read_line(store).commits[0]
        claim = runs.new_generation(store, newest)
        runs.save(store, claim, newest.step + 1)
        return newest.step + 1

    def held(step: int) -> dict[str, Any]:
        return {f"model.{name}": array for name, array in runs.tensors_of(step).items()}

    return Scenario(prepare=prepared(_to_adopt(), 1), act=act, restart=restart, expected=held)


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "first save": first_save,
    "save": later_save,
    "overlapping saves": overlapping_saves,
    "prune": retention,
    "restore": restoring,
    "copy, destination fails": copying_to,
    "copy, source fails": copying_from,
    "adopt": adopting,
}
