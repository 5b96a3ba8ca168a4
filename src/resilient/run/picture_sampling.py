"""Which steps are looked at closely: at random, the same ones on all ranks, so few that they cost next to nothing."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

from resilient.format.digest import digest

BUDGET: Final = 0.0015
"""The share of the time that looking may take."""

_COSTS: Final = 5
"""Looks whose cost is compared. What the steps themselves took longer is noise before there are so many."""


class Looks:
    """Draws steps by their number and ``topic`` alone, one in ``period`` on average.

    A rank to which looking costs more has a longer period: its steps are some of those of the others, because a step is
    drawn whose number, seen as a fraction of 1, is below 1 / period, and a collective is judged best where all look. At
    random, because what happens every so many steps, such as a save, would be seen always or never.
    """

    def __init__(self, topic: str, *, every: int) -> None:
        self._topic = topic
        self._every = every
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._longer: deque[float] = deque(maxlen=_COSTS)
        self.period = every

    def due(self, step: int) -> bool:
        """Say whether the step after ``step`` complete ones is looked at."""
        drawn = int.from_bytes(digest(f"{self._topic}/{step}".encode())[:4], "big")
        return drawn * self.period < 1 << 32

    def took(self, cost_s: float, longer_s: float, step_s: float) -> None:
        """Learn what a look has cost; keep to the budget from now on.

        Args:
            cost_s: what beginning, ending and reading took.
            longer_s: by how much the step, with all that, was longer than its neighbors.
            step_s: what a step takes.
        """
        self._costs.append(cost_s)
        self._longer.append(longer_s)
        spent_s = median(self._costs)
        if len(self._longer) == _COSTS:
            spent_s = max(spent_s, median(self._longer))
        needed = spent_s / (BUDGET * step_s) if step_s > 0 else 1.0
        self.period = self._every
        while self.period < needed:
            self.period *= 2
