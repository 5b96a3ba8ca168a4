"""How sure a count of rare events makes of their rate."""

from __future__ import annotations

import math
from collections.abc import Callable

_HALVINGS = 200


def interval(count: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Return between which two numbers the expectation lies, of which ``count`` events are one draw.

    The exact (Garwood) interval: the expectations with which so many or more, or so many or fewer, are seen in half of
    what ``confidence`` leaves. It covers at least as often as it says, also for counts of 0, 1 or 2. F. Garwood,
    "Fiducial limits for the Poisson distribution", Biometrika 28, 1936.
    """
    tail = (1 - confidence) / 2
    low = 0.0 if count == 0 else _solve(lambda mean: 1 - at_most(count - 1, mean) - tail, count)
    return low, _solve(lambda mean: tail - at_most(count, mean), count)


def at_most(count: int, mean: float) -> float:
    """Return the chance of ``count`` events or fewer, of which ``mean`` are expected."""
    if mean <= 0:
        return 1.0
    logs = [k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(count + 1)]
    return min(1.0, math.fsum(map(math.exp, logs)))


def _solve(rising: Callable[[float], float], count: int) -> float:
    """Return where a function that rises from below 0 is 0."""
    low, high = 0.0, count + 10 * math.sqrt(count + 1) + 10
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
