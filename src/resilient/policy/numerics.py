"""Whether the numbers of a step look sick, and what running it once more has shown: pure decisions.

The rule for a spike (five times what is usual) is ByteRobust's for losses and gradient norms; that a step is run again
to tell a fault of the moment from one of the data is Megatron's re-run state machine. Unlike there, runs are bounded.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from enum import IntEnum
from typing import Final, Literal

SPIKE: Final = 5.0
"""So many times the median of what was usual is a spike."""

WINDOW: Final = 64
"""Values that count as what is usual."""

FEWEST: Final = 16
"""Without so many values nothing is known to be usual."""

MAX_RERUNS: Final = 2

Outcome = Literal["healthy", "run again", "transient", "reproducible", "unstable", "not run again"]


class Suspicion(IntEnum):
    """How bad a value looks; the larger is the worse."""

    NONE = 0
    SPIKE = 1
    NON_FINITE = 2


class Usual:
    """What values of each name have been like."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {}

    def suspect(self, values: Mapping[str, float]) -> tuple[Suspicion, str]:
        """Return how bad the worst of some values looks, and that value in words."""
        worst, words = Suspicion.NONE, ""
        for name, value in values.items():
            found, said = self._suspect(name, value)
            if found > worst:
                worst, words = found, said
        return worst, words

    def accept(self, values: Mapping[str, float]) -> None:
        """Count values among what is usual."""
        for name, value in values.items():
            if math.isfinite(value):
                self._recent.setdefault(name, deque(maxlen=WINDOW)).append(abs(value))

    def _suspect(self, name: str, value: float) -> tuple[Suspicion, str]:
        if not math.isfinite(value):
            return Suspicion.NON_FINITE, f"{name} is {value}"
        recent = self._recent.get(name, ())
        if len(recent) < FEWEST:
            return Suspicion.NONE, ""
        usual = statistics.median(recent)
        if abs(value) <= SPIKE * usual or usual == 0:
            return Suspicion.NONE, ""
        return Suspicion.SPIKE, f"{name} is {value:.6g}, {abs(value) / usual:.1f} times its median of {usual:.6g}"


def judge(worst: Suspicion, *, tries: int, changed: bool) -> Outcome:
    """Say what a look at a step's values means, after it was run ``tries`` times before, with suspicious values.

    ``changed``: some rank has other values than the time before. What comes out the same again, bit by bit, is the
    step's own; what does not is a fault of the moment (if it is fine now), or of hardware that stays bad.
    """
    if worst is Suspicion.NONE:
        return "transient" if tries else "healthy"
    if tries and not changed:
        return "reproducible"
    return "run again" if tries < MAX_RERUNS else "unstable"
