"""One cell of fault_matrix.py: one system under one fault, and how what comes of it is judged."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from fault_crew import Answer, Crew
from fault_states import nbytes_of_all
from fault_systems import SYSTEMS, Where


class Outcome(StrEnum):
    """What a fault has come to, from bad to good."""

    RUNS_CODE = "runs the code"
    WRONG = "silent wrong state"
    LOST = "lost the older state"
    HANGS = "hangs"
    NO_MORE = "cannot save again"
    AT_LOAD = "error only at load"
    HOLDS = "holds"
    NOT_APPLICABLE = "not applicable"
    NOT_INSTALLED = "not installed"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    outcome: Outcome
    detail: str

    def after(self, what: str) -> Verdict:
        """Return the same, with what was seen before."""
        return replace(self, detail=f"{what}; {self.detail}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all cells share: the size of a state, how often to try, a seed, the S3 server if there is one."""

    mib: float
    tries: int
    random_kills: int
    outage_s: float
    seed: int
    server: Any = None


class Cell:
    """A system with a folder of its own; what it has started ends with ``close``."""

    def __init__(self, system: str, folder: Path, setting: Setting, fault: str) -> None:
        self.system = system
        self.kind = SYSTEMS[system]
        self.setting = setting
        self.step_nbytes = nbytes_of_all(setting.mib)
        self.rng = random.Random(f"{setting.seed} {fault} {system}")
        self.folder = folder
        self.where = Where(url=str(folder / "place"))
        self._stack = ExitStack()

    def use(self, **changes: Any) -> None:
        """Change where, or how, the crews that begin from now on save."""
        self.where = replace(self.where, **changes)

    def crew(self, ranks: int = 2) -> Crew:
        """Start new processes; they end with the cell, or when they are closed."""
        crew = Crew(self.system, self.where, self.setting.mib, ranks, self.folder)
        self._stack.callback(crew.close)
        return crew

    def close(self) -> None:
        self._stack.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def files(self) -> dict[Path, os.stat_result]:
        """Return all files of the cell."""
        return dict(_files(self.folder))

    def written_nbytes(self, before: dict[Path, os.stat_result]) -> int:
        """Return the bytes in files that are new, or others than `files` has told before."""
        return sum(found.st_size for path, found in _files(self.folder) if differs(found, before.get(path)))

    # Judging

    def restart(self, crew: Crew, fine: Iterable[int], older: int | None, *, gone: str = "") -> Verdict:
        """Restore as a restart does; say what came of it.

        Args:
            crew: new processes.
            fine: the values that may come back.
            older: a step that lies there whole, to be asked for by its number if nothing else is restored.
            gone: what is lost if nothing is restored by itself.
        """
        values = sorted({*fine, *((older,) if older else ())})
        found = self.one(crew.ask("restore", None, self._known(values)))
        if isinstance(found, Verdict):
            if found.outcome is not Outcome.AT_LOAD or older is None:
                return found if found.outcome is not Outcome.AT_LOAD else replace(found, outcome=Outcome.LOST)
            again = self.explicit(older, older)
            if again.outcome is not Outcome.HOLDS:
                return Verdict(outcome=Outcome.LOST, detail=f"{found.detail}; asked for step {older}: {again.detail}")
            detail = f"{found.detail}; step {older} loads if it is asked for by number"
            if gone:
                return Verdict(outcome=Outcome.LOST, detail=f"{gone}: {detail}")
            return Verdict(outcome=Outcome.AT_LOAD, detail=detail)
        if found in set(fine):
            return Verdict(outcome=Outcome.HOLDS, detail=f"{_named(found)} is restored")
        return Verdict(outcome=Outcome.LOST, detail=f"{_named(found)} is restored, although a later one was saved")

    def explicit(self, step: int, *fine: int, ranks: int = 2) -> Verdict:
        """Ask new processes for a step by its number."""
        with self.crew(ranks) as crew:
            found = self.one(crew.ask("restore", step, self._known(fine)))
        if isinstance(found, Verdict):
            return found
        if found in fine:
            return Verdict(outcome=Outcome.HOLDS, detail=f"{_named(found)} loads")
        return Verdict(outcome=Outcome.WRONG, detail=f"step {step} is asked for, {_named(found)} comes")

    def one(self, answers: list[Answer]) -> int | Verdict:
        """Return the value that all ranks have restored, or what went wrong."""
        for how, outcome in (("hangs", Outcome.HANGS), ("raised", Outcome.AT_LOAD), ("died", Outcome.AT_LOAD)):
            for answer in answers:
                if answer.how == how:
                    return Verdict(
                        outcome=outcome,
                        detail=f"restore {answer}" if how != "raised" else f"restore raises {answer.value}",
                    )
        found = [answer.value for answer in answers]
        if any(each.step is None for each in found):
            return Verdict(outcome=Outcome.LOST, detail="nothing is found: training starts from scratch")
        for each in found:
            if each.value is None:
                return Verdict(outcome=Outcome.WRONG, detail=f"step {each.step} loads without error: {each.why}")
            if each.step != each.value % 100:
                return Verdict(
                    outcome=Outcome.WRONG, detail=f"step {each.step} loads, with the state of {_named(each.value)}"
                )
        if len({each.value for each in found}) > 1:
            of = ", ".join(_named(each.value) for each in found)
            return Verdict(outcome=Outcome.WRONG, detail=f"the ranks load different states: {of}")
        return int(found[0].value)

    def all_reported(self, steps: Iterable[int]) -> Verdict:
        """Ask for every step that was reported saved."""
        verdict = Verdict(outcome=Outcome.HOLDS, detail="nothing was reported saved")
        for step in steps:
            verdict = self.explicit(step, step).after(f"step {step} was reported saved")
            if verdict.outcome is not Outcome.HOLDS:
                break
        return verdict

    @staticmethod
    def _known(values: Iterable[int]) -> list[int]:
        """Return all values that may be mixed into a state: those asked about first."""
        return list(dict.fromkeys([*values, *range(1, 10), 102]))


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of them; of equals the last, with how many they are."""
    found = list(verdicts)
    order = list(Outcome)
    lowest = min(order.index(each.outcome) for each in found)
    those = [each for each in found if order.index(each.outcome) == lowest]
    if len(found) == 1:
        return those[-1]
    return replace(those[-1], detail=f"{len(those)} of {len(found)} times: {those[-1].detail}")


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Look again and again; say whether it came true in time."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.0005)
    return True


def _named(value: int) -> str:
    return f"step {value % 100}" + (" (as saved again)" if value > 100 else "")


def differs(found: os.stat_result, before: os.stat_result | None) -> bool:
    return before is None or (found.st_ino, found.st_mtime_ns, found.st_size) != (
        before.st_ino,
        before.st_mtime_ns,
        before.st_size,
    )


def _files(folder: str | Path) -> Iterable[tuple[Path, os.stat_result]]:
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
            elif not entry.name.endswith(".log"):
                yield Path(entry.path), entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
