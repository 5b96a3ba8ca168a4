"""When to save: pure decisions from the step, the time since the last save, and what a save was measured to cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from resilient.config import parse_duration
from resilient.errors import ErrorKind, UsageError

PRIOR_MTBF_S: Final = 3 * 3600.0
"""Mean time between failures before any was seen: what runs on thousands of accelerators report."""

OVERHEAD_BUDGET: Final = 0.01
"""The share of training time that saving may take."""

FIRST_SAVE_S: Final = 15.0
"""The first interval of "auto", when the cost of a save is not known yet: soon, so that it gets known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveContext:
    """What a policy may look at.

    ``step`` is the completed step, ``since_save_s`` the time since the last save was started (or since the start).
    ``stall_s`` is how long the last save held up training, ``persist_s`` how long it took to be durable; None
    before the first.
    """

    step: int
    since_save_s: float
    stall_s: float | None = None
    persist_s: float | None = None
    mtbf_s: float = PRIOR_MTBF_S


class SavePolicy(Protocol):
    """Anything that says when to save."""

    def due(self, context: SaveContext) -> bool:
        """Say whether the state after ``context.step`` is to be saved."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWhen:
    """Save every so many ``steps``, every so many ``seconds``, or ``auto``: as often as pays.

    Exactly one of them; ``SaveWhen(steps=1000) | SaveWhen(seconds=120)`` saves when either is due.
    """

    steps: int | None = None
    seconds: float | None = None
    auto: bool = False
    either: tuple[SaveWhen, ...] = ()

    def __post_init__(self) -> None:
        if sum((self.steps is not None, self.seconds is not None, self.auto, bool(self.either))) != 1:
            raise _refused("SaveWhen takes exactly one of steps, seconds and auto", "combine two with |")
        if self.steps is not None and (type(self.steps) is not int or self.steps < 1):
            raise _refused(f"SaveWhen(steps={self.steps!r}): the number of steps must be 1 or more")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise _refused(f"SaveWhen(seconds={self.seconds!r}): the time between two saves must be more than 0")

    def __or__(self, other: SaveWhen) -> SaveWhen:
        return SaveWhen(either=(*self._parts(), *other._parts()))

    def _parts(self) -> tuple[SaveWhen, ...]:
        return self.either or (self,)

    @property
    def step_based(self) -> bool:
        """Whether the step alone decides: then all ranks know without a word from anybody."""
        return all(part.steps is not None for part in self._parts())

    def at_step(self, step: int) -> bool:
        """Say whether the number of the step alone makes a save due."""
        return any(part.steps is not None and step > 0 and step % part.steps == 0 for part in self._parts())

    def next_step(self, step: int) -> int | None:
        """Return the first step after ``step`` whose number alone makes a save due, or None if there is none."""
        upcoming = [(step // part.steps + 1) * part.steps for part in self._parts() if part.steps is not None]
        return min(upcoming, default=None)

    def due(self, context: SaveContext) -> bool:
        """Say whether the state after ``context.step`` is to be saved."""
        return self.at_step(context.step) or any(context.since_save_s >= each for each in self._intervals(context))

    def _intervals(self, context: SaveContext) -> Iterator[float]:
        for part in self._parts():
            if part.seconds is not None:
                yield part.seconds
            elif part.auto:
                yield auto_interval(context.stall_s, context.persist_s, context.mtbf_s)


def auto_interval(stall_s: float | None, persist_s: float | None, mtbf_s: float) -> float:
    """Return the seconds between two saves that lose the least time, work lost in failures included.

    The optimum sqrt(2 C M) of J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM
    17(9), 1974; the higher-order terms of J. T. Daly, "A higher order estimate of the optimum checkpoint interval
    for restart dumps", FGCS 22(3), 2006, matter only where C is no longer small against M, which the overhead
    budget rules out. C is what training feels of a save (``stall_s``), not how long the store takes; but two saves
    must not overlap, so it is never below twice ``persist_s``.
    """
    if stall_s is None or persist_s is None:
        return FIRST_SAVE_S
    return max(math.sqrt(2 * stall_s * mtbf_s), stall_s / OVERHEAD_BUDGET, 2 * persist_s, 1.0)


def mean_time_between_failures(age_s: float, restarts: int) -> float:
    """Return the estimate for a run of this age and so many restarts; the prior weighs as much as one failure."""
    return (PRIOR_MTBF_S + max(0.0, age_s)) / (1 + restarts)


def parse_every(every: str | int | SaveWhen) -> SaveWhen:
    """Return the policy that ``every`` stands for: ``"auto"``, a number of steps, a duration, or a policy itself.

    Raises:
        UsageError: it is none of these.
    """
    if isinstance(every, SaveWhen):
        return every
    if every == "auto":
        return SaveWhen(auto=True)
    if type(every) is int:
        return SaveWhen(steps=every)
    try:
        if not isinstance(every, str):
            raise ValueError(  # noqa: TRY004 -- caught below
                'must be "auto", a number of steps, a duration such as "90s", or a SaveWhen'
            )
        return SaveWhen(seconds=parse_duration(every))
    except ValueError as error:
        raise _refused(f"every={every!r}: it {error}") from error


def _refused(message: str, hint: str | None = None) -> UsageError:
    return UsageError(message, kind=ErrorKind.INVALID_ARGUMENT, hint=hint)
