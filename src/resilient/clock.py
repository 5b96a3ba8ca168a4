"""What time it is: the only module that imports ``time``."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Time as the rest of the package sees it; tests pass one that they move by hand."""

    def now(self) -> datetime:
        """Return the wall clock, in UTC; for people to read, never to decide from."""
        ...

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start."""
        ...

    def sleep(self, duration_s: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)


SYSTEM_CLOCK = SystemClock()
"""Shared because it holds no state; pass it as the default of a ``clock`` parameter."""


class Deadline:
    """A point in time by which something must have happened."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self._end = clock.monotonic() + timeout_s
        self.timeout_s = timeout_s

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._end - self._clock.monotonic())

    @property
    def expired(self) -> bool:
        return self._clock.monotonic() >= self._end


def rfc3339(moment: datetime) -> str:
    """Return ``moment`` as RFC 3339 in UTC, with milliseconds and a ``Z``."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
