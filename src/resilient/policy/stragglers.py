"""Which rank is slow, and in what: relative scores that have to persist.

The score is that of NVIDIA's Resiliency Extension (NVRx): the smallest median over the ranks divided by a rank's own, 1
for the fastest one; below 0.75 it is slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

SLOW: Final = 0.75
REPORTS: Final = 3
"""So many reports in a row have to say the same: a rank that is slow for a moment is none that is slow."""

WORTH: Final = 0.05
"""The share of a step below which nobody waits for long: a draw of 40 microseconds is not slow beside one of 20."""

STEP: Final = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that holds up the others: what it does in ``section`` takes ``own_s`` where the fastest takes ``best_s``.

    ``reports``: so many in a row have said so.
    """

    rank: int
    section: str
    own_s: float
    best_s: float
    reports: int

    @property
    def score(self) -> float:
        """The relative score: 1 is as fast as the fastest."""
        return self.best_s / self.own_s


def slow_in(medians: Mapping[int, Mapping[str, float]]) -> list[tuple[int, str, float, float]]:
    """Return rank, section, own and best median of what is slow in one report.

    ``medians``: of each rank, seconds by section; `STEP` is the whole step, which is the same on all ranks of a
    synchronous training, and not scored itself.
    """
    found = []
    for section in sorted({name for each in medians.values() for name in each if name != STEP}):
        own = {rank: each[section] for rank, each in medians.items() if section in each}
        if len(own) < 2:
            continue
        best_s = min(own.values())
        for rank, own_s in own.items():
            worth_s = WORTH * medians[rank].get(STEP, 0.0)
            if own_s > 0 and best_s / own_s < SLOW and own_s - best_s > worth_s:
                found.append((rank, section, own_s, best_s))
    return found


class Stragglers:
    """The rule of persistence over the reports of one generation."""

    def __init__(self) -> None:
        self._streaks: dict[tuple[int, str], int] = {}

    def take(self, medians: Mapping[int, Mapping[str, float]]) -> list[Straggler]:
        """Take one report; return the ranks that are slow for the `REPORTS`-th time in a row, once each streak."""
        slow = {(rank, section): (own_s, best_s) for rank, section, own_s, best_s in slow_in(medians)}
        self._streaks = {key: self._streaks.get(key, 0) + 1 for key in slow}
        return [
            Straggler(rank=rank, section=section, own_s=own_s, best_s=best_s, reports=REPORTS)
            for (rank, section), (own_s, best_s) in slow.items()
            if self._streaks[rank, section] == REPORTS
        ]
