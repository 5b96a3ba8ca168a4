"""The proofs bite: with each of sixteen bugs made by hand, one of them fails, and for the right reason."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import pytest

from resilient.catalog import marks
from resilient.catalog.line import read_line
from resilient.catalog.prune import prune
from resilient.errors import ResilientError, UsageError
from resilient.format.box import Box
from resilient.format.digest import BytesLike
from resilient.format.documents import Commit
from resilient.store import local
from resilient.store.base import Store
from resilient.store.local import LocalStore
from resilient.store.memory import MemoryStore
from resilient.testing import Crashed, Fault, Mode, Scenario, check_run, fail_each_operation, planted, read_arrays
from resilient.testing.bugs import BUGS
from resilient.testing.nth import Report
from resilient.writer.worker import Worker
from tests.catalog import runs
from tests.catalog.runs import HandClock, ReceiptMaker, attempt_of, commit_of, new_generation
from tests.crash import scenarios
from tests.crash.two_ranks import Direct, expected, go_on
from tests.figures import Figures
from tests.writer.staging import Array, Trainer, opened

T = TypeVar("T")


def held(step: int) -> dict[str, Any]:
    return {f"model.{name}": array for name, array in runs.tensors_of(step).items()}


def succeeds(call: Callable[[], T], what: str) -> T:
    try:
        return call()
    except ResilientError as error:
        raise AssertionError(f"{what}: {error}") from error


def sound(store: Store, at_least: int | None = None, wanted: Callable[[int], dict[str, Any]] | None = None) -> None:
    violations = check_run(store, at_least=at_least, expected=wanted)
    assert violations == [], "; ".join(map(str, violations))


class Interrupted(MemoryStore):
    """Somebody else does something, once, just before an object is written whose key begins like this."""

    def __init__(self) -> None:
        super().__init__()
        self._prefix: str | None = None
        self._meanwhile: Callable[[], object] = lambda: None

    def interrupt(self, prefix: str, meanwhile: Callable[[], object]) -> None:
        self._prefix, self._meanwhile = prefix, meanwhile

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        self._look(key)
        super().put(key, parts)

    def create(self, key: str, data: bytes) -> bool:
        self._look(key)
        return super().create(key, data)

    def _look(self, key: str) -> None:
        if self._prefix is not None and key.startswith(self._prefix):
            self._prefix = None
            self._meanwhile()


# --- found by failing each operation ----------------------------------------------------------------------------------


def crashes(verb: str, key: str = "*") -> list[Fault]:
    return [Fault(mode=Mode.CRASH, verbs={verb}, key=key)]


def a_save_dies_anywhere(_: Path) -> None:
    faults = [*crashes("put"), *crashes("create")]
    fail_each_operation(MemoryStore, scenarios.later_save(), faults=faults)


def saves_with_retention_die_anywhere(_: Path) -> None:
    fail_each_operation(MemoryStore, scenarios.overlapping_saves(), faults=crashes("create", "*/COMMIT"))


def saves_that_share_data_die_anywhere(_: Path) -> None:
    fail_each_operation(MemoryStore, scenarios.overlapping_saves(), faults=crashes("create", "*/marks/referenced-*"))


def answers_are_lost(_: Path) -> None:
    faults = [Fault(mode=Mode.LOSE_RESPONSE, verbs={"create"})]
    fail_each_operation(MemoryStore, scenarios.later_save(), faults=faults)


def bits_flip_under_a_restore(_: Path) -> None:
    faults = [Fault(mode=Mode.CORRUPT_READ, verbs={"read_into"}, key="data/*")]
    fail_each_operation(MemoryStore, scenarios.restoring(), faults=faults)


def listings_lag_behind(_: Path) -> None:
    """A second generation has gone back to step 1, and has saved nothing yet."""

    def prepare(store: Store) -> int:
        first = new_generation(store)
        for step in (1, 2):
            runs.save(store, first, step)
        new_generation(store, read_line(store).at(1))
        return 1

    def act(store: Store, report: Report) -> None:
        steps = [commit.step for commit in read_line(store).commits]
        assert steps == [1], f"steps {steps} are on the line"
        report(1)

    def restart(store: Store) -> int:
        runs.save(store, new_generation(store, read_line(store).commits[0]), 3)
        return 3

    scenario = Scenario(prepare=prepare, act=act, restart=restart, expected=held)
    fail_each_operation(MemoryStore, scenario, faults=[Fault(mode=Mode.STALE_LIST, stale_keys=2)])


# --- found by somebody who stalls -------------------------------------------------------------------------------------


def a_zombie_of_an_earlier_generation_commits(_: Path) -> None:
    store = MemoryStore()
    first = new_generation(store)
    runs.save(store, first, 1)
    late = runs.save(store, first, 3, commit=False)
    runs.save(store, new_generation(store, read_line(store).at(1)), 2)
    assert isinstance(commit_of(store, late), Commit)
    steps = [commit.step for commit in read_line(store).commits]
    assert steps == [2, 1], f"steps {steps} are on the line"


def a_committer_wakes_up_after_retention(_: Path) -> None:
    store = Interrupted()
    claim = new_generation(store)
    attempt = runs.save(store, claim, 1, commit=False)

    def meanwhile() -> None:
        assert isinstance(commit_of(store, attempt, committer=1), Commit)
        for step in (2, 3):
            runs.save(store, claim, step)
        prune(store, read_line(store), {3}, clock=HandClock(), grace_s=0.0)

    store.interrupt(attempt.commit, meanwhile)
    with suppress(ResilientError):
        commit_of(store, attempt)
    sound(store, 3, held)


def two_committers_see_different_receipts(_: Path) -> None:
    """As where a store cannot decide between two writers of a receipt."""
    store = Interrupted()
    attempt = attempt_of(new_generation(store), 1)
    whole = np.arange(8, dtype=np.int64)

    def receipt(rank: int, *names: str) -> None:
        maker = ReceiptMaker(attempt, rank, 2)
        for name in names:
            maker.tensor(name, whole)
        maker.write(store)

    def meanwhile() -> None:
        store.delete(attempt.receipt(1))
        receipt(1, "b", "more")
        assert isinstance(commit_of(store, attempt, committer=1), Commit)

    receipt(0, "a")
    receipt(1, "b")
    store.interrupt(f"{attempt.prefix}manifest-", meanwhile)
    assert isinstance(commit_of(store, attempt), Commit)
    sound(store, 1)


def retention_while_somebody_reads(_: Path) -> None:
    store = MemoryStore()
    claim = new_generation(store)
    for step in (1, 2):
        runs.save(store, claim, step)
    chosen = read_line(store).at(1)
    with marks.reading(store, chosen, HandClock()):
        for _pass in range(2):
            prune(store, read_line(store), {2}, clock=HandClock(), grace_s=0.0)
        arrays = succeeds(lambda: read_arrays(store, chosen), "what is being read was deleted")
    assert arrays["model.w"].tobytes() == runs.tensors_of(1)["w"].tobytes()


def save_alone(
    store: Store, arrays: dict[str, Array], *, replicas: dict[str, Array] | None = None, into: list[Trainer]
) -> None:
    """Save step 1 on one rank; the trainer is in ``into`` from before anything is written."""
    trainer = Trainer(new_generation(store))
    into.append(trainer)
    worker = Worker(store, opened(store, trainer.claim, commit_timeout_s=5.0), trainer.slots, trainer.hear)
    trainer.link = Direct(worker)
    worker.save(trainer.staged(1, arrays, replicas=replicas or {}))


def a_slot_is_used_again_too_early(_: Path) -> None:
    store = Interrupted()
    trainers: list[Trainer] = []
    array = np.arange(512, dtype=np.int64)

    def meanwhile() -> None:
        (slot,) = trainers[0].slots
        slot.begin(generation=1, step=2)
        slot.payload[: array.nbytes] = bytes(array.nbytes)

    store.interrupt("data/", meanwhile)
    save_alone(store, {"w": array}, into=trainers)
    sound(store, wanted=lambda _: {"model.w": array})


# --- found by what nobody stored --------------------------------------------------------------------------------------


def a_part_of_a_tensor_is_stored_by_nobody(_: Path) -> None:
    store = MemoryStore()
    attempt = attempt_of(new_generation(store), 1)
    whole = np.arange(24, dtype=np.float32).reshape(6, 4)
    ReceiptMaker(attempt).tensor("w", whole, Box((0, 0), (3, 4))).write(store)
    with suppress(ResilientError):
        commit_of(store, attempt, world_size=1)
    sound(store, wanted=lambda _: {"model.w": whole})


def a_tensor_is_held_and_stored_by_nobody(_: Path) -> None:
    store = MemoryStore()
    kept, lost = np.arange(8, dtype=np.int64), np.arange(9, dtype=np.int64)
    save_alone(store, {"kept": kept}, replicas={"lost": lost}, into=[])
    sound(store, wanted=lambda _: {"model.kept": kept, "model.lost": lost})


# --- found by what a disk and a kill do -------------------------------------------------------------------------------


class PowerCut:
    """Knows which entries of a directory are on the disk: those that it had when it was synced last."""

    def __init__(self) -> None:
        self._durable: dict[Path, set[Path]] = {}

    def fsync(self, file: int) -> None:
        path = Path(f"/proc/self/fd/{file}").readlink()
        if path.is_dir():
            self._durable[path] = set(path.iterdir())

    def cut(self, folder: Path) -> None:
        """Take away what would be gone."""
        for entry in list(folder.iterdir()):
            if entry in self._durable.get(folder, ()):
                if entry.is_dir():
                    self.cut(entry)
            elif entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def the_power_fails_after_a_save(folder: Path) -> None:
    power = PowerCut()
    with patch.object(os, "fsync", power.fsync):
        step = go_on(LocalStore(folder / "run"))
    power.cut(folder)
    sound(LocalStore(folder / "run"), step, expected)


def a_committer_is_killed_in_the_middle_of_a_write(folder: Path) -> None:
    for number in (1, 2):  # of the manifest, of the COMMIT
        store = LocalStore(folder / str(number))
        attempt = runs.save(store, new_generation(store), 1, commit=False)
        with patch.object(local, "_write", Killed(local._write, number)), pytest.raises(Crashed):
            commit_of(store, attempt)
        succeeds(lambda: commit_of(store, attempt, committer=1), "what was left behind blocks the others")  # noqa: B023
        sound(store, 1, held)


class Killed:
    """Writes half of what it should, the ``number``-th time, and never returns."""

    def __init__(self, write: Callable[[int, Sequence[memoryview]], None], number: int) -> None:
        self._write = write
        self._left = number

    def __call__(self, file: int, views: Sequence[memoryview]) -> None:
        self._left -= 1
        if self._left:
            self._write(file, views)
            return
        whole = b"".join(views)
        self._write(file, [memoryview(whole)[: len(whole) // 2]])
        raise Crashed("killed")


# --- the table --------------------------------------------------------------------------------------------------------

FOUND_BY: dict[str, tuple[Callable[[Path], None], str]] = {
    "commit-before-data": (a_save_dies_anywhere, "what is listed is whole"),
    "no-directory-fsync": (the_power_fails_after_a_save, "what was reported as saved is there"),
    "exclusive-create": (a_committer_is_killed_in_the_middle_of_a_write, "what was left behind blocks the others"),
    "highest-step-is-latest": (a_zombie_of_an_earlier_generation_commits, r"steps \[3, 2, 1\] are on the line"),
    "late-base": (a_save_dies_anywhere, "no damage hides checkpoints"),
    "no-digest-check": (bits_flip_under_a_restore, "is wrong"),
    "prune-before-commit": (saves_with_retention_die_anywhere, "what was reported as saved is there"),
    "commit-removed": (a_committer_wakes_up_after_retention, "what is listed is whole"),
    "one-manifest-name": (two_committers_see_different_receipts, "what is listed is whole"),
    "no-own-write-recognition": (answers_are_lost, "nothing happened that stays"),
    "no-coverage-check": (a_part_of_a_tensor_is_stored_by_nobody, "elements of model.w are nowhere"),
    "receipts-list-only-stored": (a_tensor_is_held_and_stored_by_nobody, "model.lost is not in it"),
    "late-references": (saves_that_share_data_die_anywhere, "what is referred to is protected"),
    "no-slot-recheck": (a_slot_is_used_again_too_early, "is whole|holds what was saved"),
    "trusted-list": (listings_lag_behind, r"steps \[2, 1\] are on the line"),
    "unmarked-reader": (retention_while_somebody_reads, "what is being read was deleted"),
}
"""For each bug, what finds it, and what is said then."""


@pytest.mark.proof
@pytest.mark.parametrize("bug", BUGS)
def test_each_bug_is_found(bug: str, tmp_path: Path, figures: Callable[[str, str], Figures]) -> None:
    rounds = figures("planted-bugs", "A bug is planted, and a proof fails")
    if any(bug in line for line in rounds):
        return  # done before this proof was interrupted
    scenario, said = FOUND_BY[bug]
    with planted(bug), pytest.raises(AssertionError, match=said):
        scenario(tmp_path / "with")
    scenario(tmp_path / "without")  # holds, and nothing is left of the bug
    rounds.add(**{bug: scenario.__name__.replace("_", " ")})


def test_sixteen_bugs_say_what_they_are() -> None:
    assert len(BUGS) == 16
    assert all(bug.what for bug in BUGS.values())


def test_an_unknown_bug_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no bug 'off-by-one'"), planted("off-by-one"):
        pass
