"""How a figure is taken and told: one JSON line each, a median with its range."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of a result. ``range`` holds the smallest and the largest of the ``median_of`` values."""

    benchmark: str
    case: str
    metric: str
    value: float
    unit: str
    median_of: int
    range: tuple[float, float]


def tell(benchmark: str, case: str, metric: str, unit: str, values: Sequence[float]) -> Figure:
    """Print the median of some values as one JSON line on standard output, and return it."""
    figure = Figure(
        benchmark=benchmark,
        case=case,
        metric=metric,
        value=_rounded(statistics.median(values)),
        unit=unit,
        median_of=len(values),
        range=(_rounded(min(values)), _rounded(max(values))),
    )
    print(json.dumps(asdict(figure)), flush=True)
    return figure


def progress(message: str) -> None:
    """Say on standard error what is being done: standard output is for figures."""
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def timed(work: Callable[[], object]) -> float:
    """Return how many seconds some work takes."""
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def bootstrap(values: Sequence[float], *, resamples: int = 4000) -> tuple[float, float]:
    """Return the 95 % interval of the median, by drawing from the values again and again."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples))
    return medians[round(0.025 * resamples)], medians[round(0.975 * resamples) - 1]


def _rounded(value: float) -> float:
    """Five digits: more is noise, and a table of them cannot be read."""
    return float(f"{value:.5g}")
