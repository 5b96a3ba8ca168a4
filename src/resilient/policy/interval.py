"""When to save: pure decisions from the step, the time since the last save, and what a save was measured to cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from resilient.config import parse_duration
from resilient.errors import ErrorKind, UsageError
from resilient.policy.planning.choosing import OVERHEAD_BUDGET, Choice, choose

PRIOR_MTBF_S: Final = 3 * 3600.0
"""Mean time between failures before any was seen: what runs on thousands of accelerators report."""

FIRST_SAVE_S: Final = 15.0
"""The first interval of "auto", when the cost of a save is not known yet: soon, so that it gets known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveContext:
    """What a policy may look at.

    ``step`` is the completed step, ``since_save_s`` the time since the last save was started (or since the start).
    ``stall_s`` is how long a save holds up training, waiting at the fence included, ``persist_s`` how long it takes to
    be durable, ``worst_persist_s`` how long at worst, by the last few; None before the first. ``late_s``: by how much
    saves start later than they are due. ``overhead_budget`` and ``rpo_s``: as in `resilient.config.Settings`.
    """

    step: int
    since_save_s: float
    stall_s: float | None = None
    persist_s: float | None = None
    mtbf_s: float = PRIOR_MTBF_S
    worst_persist_s: float | None = None
    late_s: float = 0.0
    overhead_budget: float = OVERHEAD_BUDGET
    rpo_s: float | None = None

    def choice(self) -> Choice | None:
        """Return what "auto" takes; None as long as the cost of a save is not known."""
        if self.stall_s is None or self.persist_s is None:
            return None
        return choose(
            stall_s=self.stall_s,
            persist_s=self.persist_s,
            mtbf_s=self.mtbf_s,
            budget=self.overhead_budget,
            rpo_s=self.rpo_s,
            worst_persist_s=self.worst_persist_s,
            late_s=self.late_s,
        )


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
    def automatic(self) -> bool:
        """Whether what is measured has a say in it."""
        return any(part.auto for part in self._parts())

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
                yield auto_interval(context)


def auto_interval(context: SaveContext) -> float:
    """Return the seconds between the starts of two saves that lose the least time, work lost in failures included.

    As `resilient.policy.planning.choosing.choose` says, from what the run has measured; before that soon, so that the
    cost gets known, whatever the objective.
    """
    choice = context.choice()
    return FIRST_SAVE_S if choice is None else choice.period_s


def mean_time_between_failures(age_s: float, restarts: int) -> float:
    """Return the estimate for a run of this age and so many restarts; the prior weighs as much as one failure."""
    return (PRIOR_MTBF_S + max(0.0, age_s)) / (1 + restarts)


def parse_every(every: str | int | SaveWhen, *, rpo_s: float | None = None) -> SaveWhen:
    """Return the policy that ``every`` stands for: ``"auto"``, a number of steps, a duration, or a policy itself.

    Raises:
        UsageError: it is none of these; or there is an objective, ``rpo_s``, and nothing of ``every`` is "auto".
    """
    policy = _parsed(every)
    if rpo_s is not None and not policy.automatic:
        raise _refused(
            f"rpo={rpo_s:g} s with every={every!r}: it must be automatic, or there is nothing that rpo could change",
            'leave out rpo, or set every="auto"; SaveWhen(steps=1000) | SaveWhen(auto=True) saves at those steps too',
        )
    return policy


def _parsed(every: str | int | SaveWhen) -> SaveWhen:
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
