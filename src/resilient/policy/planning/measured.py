"""What a save costs, from the last few: quick to follow a change, deaf to one that is out of line."""

from __future__ import annotations

from typing import Final

_WINDOW: Final = 8
"""So many saves are remembered: a change of cost is known in full after as many."""

_ENOUGH: Final = 4
"""From so many on, the highest and the lowest are left out."""


class Measured:
    """Durations of the last saves, in seconds; None before the first. Added by one thread, read by any.

    ``usual_s``: the mean without the highest and the lowest; of fewer than four, the median. A mean, because a budget
    is about sums, and every other save may be slow; without the highest, because one save that hit a hiccup of the
    store must not move the interval. ``worst_s``: the highest but one; of fewer than four, the highest.
    """

    def __init__(self) -> None:
        self.usual_s: float | None = None
        self.worst_s: float | None = None
        self._values: tuple[float, ...] = ()

    def add(self, duration_s: float) -> None:
        """Take note of one more."""
        self._hold((*self._values, duration_s)[-_WINDOW:])

    def add_to_last(self, duration_s: float) -> None:
        """Take note that the last one took so much longer than was known."""
        if self._values:
            self._hold((*self._values[:-1], self._values[-1] + duration_s))

    def _hold(self, values: tuple[float, ...]) -> None:
        self._values = values
        ordered = sorted(values)
        if len(ordered) < _ENOUGH:
            self.usual_s, self.worst_s = ordered[(len(ordered) - 1) // 2], ordered[-1]
        else:
            self.usual_s, self.worst_s = sum(ordered[1:-1]) / (len(ordered) - 2), ordered[-2]
