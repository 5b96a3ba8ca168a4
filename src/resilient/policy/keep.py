"""Which checkpoints stay."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

from resilient.config import parse_duration
from resilient.errors import ErrorKind, UsageError


class Saved(Protocol):
    """What a policy looks at of a checkpoint; ``created`` is RFC 3339."""

    @property
    def step(self) -> int: ...
    @property
    def created(self) -> str: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


class Retention(Protocol):
    """Anything that says which checkpoints stay."""

    def kept(self, saved: Sequence[Saved], *, failed: Collection[int] = ()) -> frozenset[int]:
        """Return the steps of those of ``saved`` that stay; ``failed`` are steps that are marked so."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Keep a checkpoint that any of these keeps; ``Keep(...) | Keep(...)`` keeps what either does.

    ``last``: the newest ones, at least one. ``every``: those whose step is a multiple of it. ``every_time``: one for
    each such time (``"6h"``). ``best``: so many whose ``metric``, as `Run.metrics` said it, is lowest (``mode="min"``)
    or highest (``"max"``).

    The newest one always stays. One that is marked failed takes nobody's place: as many good ones stay as if it were
    not there.
    """

    last: int = 3
    every: int | None = None
    every_time: str | None = None
    best: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    either: tuple[Keep, ...] = ()

    def __post_init__(self) -> None:
        if type(self.last) is not int or self.last < 1:
            raise _refused(
                f"Keep(last={self.last!r}): at least the newest checkpoint must stay, or a failure loses the run"
            )
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise _refused(
                f"Keep(every={self.every!r}): every how many steps a checkpoint stays for ever must be 1 or more"
            )
        if self.every_time is not None:
            try:
                parse_duration(self.every_time)
            except ValueError as error:
                raise _refused(f"Keep(every_time={self.every_time!r}): it {error}") from error
        self._check_best()

    def _check_best(self) -> None:
        if self.best is not None and (type(self.best) is not int or self.best < 1):
            raise _refused(f"Keep(best={self.best!r}): how many of the best stay must be 1 or more")
        if (self.best is None) != (self.metric is None):
            raise _refused(
                f"Keep(best={self.best!r}, metric={self.metric!r}): the two must come together",
                'name what run.metrics reports: Keep(best=2, metric="loss")',
            )
        if self.mode not in ("min", "max"):
            raise _refused(f'Keep(mode={self.mode!r}): it must be "min" or "max"')

    def __or__(self, other: Keep) -> Keep:
        return Keep(last=max(self.last, other.last), either=(*self._parts(), *other._parts()))

    def _parts(self) -> tuple[Keep, ...]:
        return self.either or (self,)

    def kept(self, saved: Sequence[Saved], *, failed: Collection[int] = ()) -> frozenset[int]:
        """Return the steps of those of ``saved`` that stay; ``failed`` are steps that are marked so."""
        ordered = sorted(saved, key=lambda one: one.step)
        good = [one for one in ordered if one.step not in failed]
        steps: set[int] = set()
        for part in self._parts():
            # Failed ones stay for as long as they are among the newest: whoever looks for the reason needs them.
            steps.update(one.step for one in (*ordered[-part.last :], *good[-part.last :]))
            steps.update(one.step for one in ordered if part.every and one.step % part.every == 0)
            steps.update(_spaced(good, part.every_time))
            steps.update(_best(good, part.best, part.metric, part.mode))
        return frozenset(steps)


def _spaced(ordered: Iterable[Saved], every_time: str | None) -> Iterator[int]:
    """Yield the steps of one checkpoint for each span of time, beginning with the oldest.

    A clock that is wrong makes more stay, never the newest ones go: a time before the last one begins anew.
    """
    if every_time is None:
        return
    span_s = parse_duration(every_time)
    before: float | None = None
    for one in ordered:
        now = _timestamp(one.created)
        if before is None or now is None or not before <= now < before + span_s:
            yield one.step
            before = now


def _best(ordered: Iterable[Saved], count: int | None, metric: str | None, mode: str) -> list[int]:
    """Return the steps of the best; of equally good ones the newer."""
    if count is None or metric is None:
        return []
    sign = 1 if mode == "min" else -1
    ranked = [
        (sign * value, -one.step)
        for one in ordered
        if (value := one.metrics.get(metric)) is not None and math.isfinite(value)
    ]
    return [-step for _, step in sorted(ranked)[:count]]


def _timestamp(created: str) -> float | None:
    try:
        return datetime.fromisoformat(created).timestamp()
    except ValueError:
        return None


def _refused(message: str, hint: str | None = None) -> UsageError:
    return UsageError(message, kind=ErrorKind.INVALID_ARGUMENT, hint=hint)
