"""What share of the time is productive with two tiers of checkpoints, by simulating many failures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_LIVES: Final = 200
"""So many failures in a row make one history; work that a slow upload has not secured yet crosses failures."""

_Z95: Final = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Saves to a near tier every ``interval_s`` of training, of which every ``every``-th goes to the store as well.

    Each save stalls training for ``stall_s``. ``near_lag_s`` and ``store_lag_s``: from its start until the near copy,
    or the one in the store, counts. A failure leaves the near tier with a chance of ``survives``; then recovery
    takes ``near_recovery_s``, else ``store_recovery_s``, and in both cases ``detection_s`` before. One tier alone: all
    survives, and the near tier is the store.
    """

    mtbf_s: float
    interval_s: float
    stall_s: float
    near_recovery_s: float
    near_lag_s: float | None = None
    survives: float = 1.0
    every: int = 1
    store_recovery_s: float = 0.0
    store_lag_s: float = 0.0
    detection_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with half the width of its 95 % confidence interval, from ``failures`` simulated failures."""

    mean: float
    half_width: float
    failures: int


def simulate(tiers: Tiers, *, histories: int = 2000, seed: int = 0) -> Estimate:
    """Return the expected ETTR; the same seed gives the same failures, so that intervals can be compared.

    Failures come at random at a constant rate, also while the job recovers: then it recovers anew; not while one is
    still undetected. What is not durable
    when one comes is lost, an upload under way too; after a recovery from the near tier the restored state is uploaded
    first of all. Saves are counted from each recovery on. The confidence interval is that of a ratio of two means over
    independent histories of 200 failures each (delta method).
    """
    draw = np.random.default_rng(seed)
    state = _State(histories)
    for _ in range(_LIVES):
        state.live(
            tiers,
            life_s=draw.exponential(tiers.mtbf_s, histories),
            survived=draw.random(histories) < tiers.survives,
        )
    useful_s, wall_s = state.kept() * tiers.interval_s, state.wall_s
    mean = float(useful_s.sum() / wall_s.sum())
    spread = float(np.std(useful_s - mean * wall_s, ddof=1)) / float(wall_s.mean())
    return Estimate(mean=mean, half_width=_Z95 * spread / math.sqrt(histories), failures=histories * _LIVES)


class _State:
    """Where many independent histories are. Positions count intervals of work since the beginning."""

    def __init__(self, histories: int) -> None:
        self.wall_s: NDArray[np.float64] = np.zeros(histories)
        self._near: NDArray[np.int64] = np.zeros(histories, np.int64)
        self._store: NDArray[np.int64] = np.zeros(histories, np.int64)
        self._has_near: NDArray[np.bool_] = np.ones(histories, np.bool_)

    def kept(self) -> NDArray[np.int64]:
        """Return what is durable, after the last failure has taken what it took."""
        return np.where(self._has_near, self._near, self._store)

    def live(self, tiers: Tiers, *, life_s: NDArray[np.float64], survived: NDArray[np.bool_]) -> None:
        """Go from one failure, which the near tier ``survived``, to the next, ``life_s`` after it is detected."""
        self._has_near &= survived
        begun = self.kept()
        recovery_s = np.where(self._has_near, tiers.near_recovery_s, tiers.store_recovery_s)
        work_s = life_s - recovery_s
        near_lag_s = tiers.stall_s if tiers.near_lag_s is None else max(tiers.stall_s, tiers.near_lag_s)
        # Before anything is saved anew: from a near copy, so that a later loss of it costs less.
        uploaded = self._has_near & (work_s >= tiers.store_lag_s)
        self._store = np.where(uploaded, np.maximum(self._store, begun), self._store)
        saved = begun + _complete(work_s, near_lag_s, tiers)
        stored = (begun + _complete(work_s, max(near_lag_s, tiers.store_lag_s), tiers)) // tiers.every * tiers.every
        self._store = np.maximum(self._store, np.where(stored > begun, stored, 0))
        self._has_near |= saved > begun
        self._near = np.where(saved > begun, saved, np.where(self._has_near, begun, self._near))
        self.wall_s += tiers.detection_s + life_s


def _complete(work_s: NDArray[np.float64], lag_s: float, tiers: Tiers) -> NDArray[np.int64]:
    """Return how many saves are durable after ``work_s``; the k-th begins after k intervals and k - 1 stalls."""
    periods = (work_s + tiers.stall_s - lag_s) / (tiers.interval_s + tiers.stall_s)
    return np.maximum(0, np.floor(periods)).astype(np.int64)
