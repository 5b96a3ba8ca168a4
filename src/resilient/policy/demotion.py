"""Whether a checkpoint is to blame for the failures after it: a pure decision from how the lives of a run ended.

Two failures alike, soon after restoring the same checkpoint, speak against it: it is demoted, and the next older one is
taken. If the failure comes again at the same step, whatever the run starts from, it is not the checkpoint, and further
tries would only cost time: that is the verdict.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Generic, TypeVar

CODE: Final = "code"
NUMERIC: Final = "numeric"
ENVIRONMENT: Final = "environment"
"""Memory, disks, devices, files: no checkpoint is to blame for that."""

SOON_STEPS: Final = 100
"""So many steps after a restore a failure may still come from what was restored."""

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a life ended. ``message`` must not hold what differs from time to time; ``since`` counts from the restore.

    ``leaves_out``: the samples that it failed by, and that its successor was not to use.
    """

    error: str
    message: str
    program: str
    cause: str
    step: int
    since: int
    leaves_out: str = ""

    def is_like(self, other: Failure) -> bool:
        """Say whether this is the same failure, at whatever step; not if the program has been changed in between."""
        # Who fails by other samples, after those of the last time were left out, has got further.
        mine, theirs = ((each.error, each.message, each.program, each.leaves_out) for each in (self, other))
        return mine == theirs

    def __str__(self) -> str:
        return f"{self.error}: {self.message}" if self.message else self.error


@dataclass(frozen=True, slots=True, kw_only=True)
class Life(Generic[S]):
    """One life of a run: what it started from (None: fresh), and how it failed, if it did.

    ``progressed``: the run has gone on from a checkpoint of this life, or can.
    """

    start: S | None
    failure: Failure | None
    progressed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Demote(Generic[S]):
    """Mark this one failed, and take an older one."""

    start: S
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Generic[S]):
    """Do not try again.

    ``lives`` failures are alike. They came after each of ``starts``: if these are several, none of them is to blame,
    and ``reinstate`` of them should not stay demoted. ``spent``: instead, so many demotions have not helped.
    """

    failure: Failure
    lives: int
    starts: tuple[S | None, ...]
    reinstate: tuple[S, ...] = ()
    spent: int = 0


def judge(
    lives: Sequence[Life[S]],
    candidates: Sequence[S],
    demoted: Collection[S],
    *,
    max_demotions: int,
    max_failed_attempts: int,
) -> Demote[S] | Verdict[S] | None:
    """Decide before a restore.

    Args:
        lives: the newest first, without a gap.
        candidates: what could be restored and is not marked failed, the newest first.
        demoted: those starts of ``lives`` that the run itself has marked failed.
        max_demotions: how many there may be without any progress between them.
        max_failed_attempts: so many failures in a row, alike and at the same step, are the verdict.
    """
    if not lives or lives[0].failure is None:
        return None
    newest = lives[0].failure
    suspect = _suspect(lives)
    if suspect is not None and suspect in candidates[:-1] and max_demotions:
        stretch = takewhile(lambda life: not life.progressed, lives)
        spent = len({life.start for life in stretch if life.start is not None and life.start in demoted})
        if spent < max_demotions:
            return Demote(start=suspect, failure=newest)
        return Verdict(failure=newest, lives=2, starts=(suspect,), spent=spent)
    alike = list(takewhile(lambda life: _is_again(life, newest), lives))
    if len(alike) < max_failed_attempts:
        return None
    starts = tuple(dict.fromkeys(life.start for life in alike))
    reinstate = tuple(start for start in starts if start is not None and start in demoted)
    return Verdict(failure=newest, lives=len(alike), starts=starts, reinstate=reinstate)


def _suspect(lives: Sequence[Life[S]]) -> S | None:
    """Return what the newest two lives have both restored, and then failed alike, soon and without any progress."""
    if len(lives) < 2 or lives[0].start is None or lives[0].start != lives[1].start or lives[0].progressed:
        return None
    first, second = lives[1].failure, lives[0].failure
    if first is None or second is None or not second.is_like(first):
        return None
    soon = max(first.since, second.since) <= SOON_STEPS
    return lives[0].start if soon and ENVIRONMENT not in (first.cause, second.cause) else None


def _is_again(life: Life[S], newest: Failure) -> bool:
    return life.failure is not None and life.failure.is_like(newest) and life.failure.step == newest.step
