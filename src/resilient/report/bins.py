"""Long series made short enough to draw: for each pixel, the least, the largest and the mean value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Of equally wide bins: least, largest and mean value in each, NaN where there is none."""

    low: Floats
    high: Floats
    mean: Floats

    @property
    def peak(self) -> float:
        """The largest value; 0 if there is none."""
        return float(np.nanmax(self.high)) if np.isfinite(self.high).any() else 0.0


def envelope(
    points: Iterable[tuple[Floats | Sequence[float], Floats | Sequence[float]]], began: float, ended: float, bins: int
) -> Envelope:
    """Return what lies between ``began`` and ``ended`` of several series of (times, values), in ``bins`` bins.

    A peak of one sample stays to be seen however many samples a bin has: it is in ``high``.
    """
    low, high = np.full(bins, np.inf), np.full(bins, -np.inf)
    total, samples = np.zeros(bins), np.zeros(bins)
    for times, values in points:
        at, value = np.asarray(times, dtype=np.float64), np.asarray(values, dtype=np.float64)
        inside = (at >= began) & (at <= ended) & np.isfinite(value)
        value = value[inside]
        place = np.minimum(((at[inside] - began) * (bins / max(ended - began, 1e-9))).astype(np.int64), bins - 1)
        np.minimum.at(low, place, value)
        np.maximum.at(high, place, value)
        total += np.bincount(place, value, bins)
        samples += np.bincount(place, minlength=bins)
    empty = samples == 0
    low[empty] = high[empty] = np.nan
    mean = np.divide(total, samples, out=np.full(bins, np.nan), where=~empty)
    return Envelope(low=low, high=high, mean=mean)


def pieces(values: Floats) -> list[tuple[int, int]]:
    """Return the stretches (first, one past the last) in which there are values."""
    there = np.concatenate(([False], np.isfinite(values), [False]))
    edges = np.flatnonzero(there[1:] != there[:-1])
    return [(int(first), int(end)) for first, end in zip(edges[::2], edges[1::2], strict=True)]


def regular(began_s: float, period_s: float, count: int) -> Floats:
    """Return the times of samples that were taken every ``period_s``."""
    times: Floats = began_s + period_s * np.arange(count, dtype=np.float64)
    return times
