"""How often to save and what share of the time is then productive, by the formulas of Young, Daly and Kokolis.

Names: an ``interval`` is the training time between two saves (``tau`` in the papers), a ``stall`` what training feels
of one save (``delta`` or ``w``), ``persist`` the time from the start of a save until it is durable, ``recovery`` the
time from the detection of a failure until training goes on (``R``), all in seconds, as is the mean time between
failures, ``mtbf`` (``M``). Failures come at random, at a constant rate, also while a job recovers. Another one while
the first is not yet detected adds nothing: one recovery mends both.
"""

from __future__ import annotations

import math
from typing import Final

_DAY_S: Final = 86400.0
_OVERFLOW: Final = 700.0  # of exp: what is so many times longer than the MTBF never comes about
_NEWTON_STEPS: Final = 60
_SMALL: Final = 1e-6  # of stall/mtbf: below, Daly's series is more exact than subtracting numbers close to 1


def mtbf_of(gpus: int, *, gpus_per_node: int, failures_per_1000_node_days: float) -> float:
    """Return the mean time between failures of a job in seconds; infinite if nodes never fail.

    A failure of any node is one of the job. Failures per 1,000 node-days are what clusters publish: 6.50 and 2.34 for
    RSC-1 and RSC-2 (Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters",
    arXiv 2410.21680).
    """
    nodes = math.ceil(gpus / gpus_per_node)
    rate = nodes * failures_per_1000_node_days / 1000
    return _DAY_S / rate if rate > 0 else math.inf


def ettr(
    interval_s: float,
    *,
    stall_s: float,
    mtbf_s: float,
    recovery_s: float,
    persist_s: float | None = None,
    detection_s: float = 0.0,
) -> float:
    """Return the expected share of wall clock that is productive (effective training time ratio): 0 to 1.

    Daly's complete model (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22(3), 2006): wall / useful time = M e^(R/M) (e^((tau+w)/M) - 1) / tau, with two
    additions. There a save is durable when its stall ends; if it is later (``persist_s``, by default ``stall_s``), that
    lag loses work as so much more recovery would. And each failure takes ``detection_s`` before its recovery, a time in
    which no other one counts. Exact as long as ``persist_s`` is not longer than the interval, with which saves would
    overlap.
    """
    if interval_s <= 0:
        return 0.0
    if math.isinf(mtbf_s):
        return interval_s / (interval_s + stall_s)
    lag_s = 0.0 if persist_s is None else max(0.0, persist_s - stall_s)
    period, waiting = (interval_s + stall_s) / mtbf_s, (recovery_s + lag_s) / mtbf_s
    if max(period, waiting) > _OVERFLOW:
        return 0.0
    return interval_s / mtbf_s * math.exp(-waiting) / math.expm1(period) / (1 + detection_s / mtbf_s)


def rsc_ettr(interval_s: float, *, stall_s: float, mtbf_s: float, recovery_s: float) -> float:
    """Return the expected ETTR by the straight line of Kokolis et al. (arXiv 2410.21680), not below 0.

    (1 - (u0 + tau/2) / M) / (1 + w/tau). It leaves out that recoveries and lost work can fail as well, so it is right
    where failures are rare (above an ETTR of about 0.85), and far too low where they are not.
    """
    return max(0.0, 1 - (recovery_s + interval_s / 2) / mtbf_s) / (1 + stall_s / interval_s)


def young_interval(stall_s: float, mtbf_s: float) -> float:
    """Return sqrt(2 w M).

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """
    return math.sqrt(2 * stall_s * mtbf_s)


def daly_first_order(stall_s: float, mtbf_s: float, *, recovery_s: float) -> float:
    """Return sqrt(2 w (M + R)) - w, not below 0.

    J. T. Daly, "A model for predicting the optimum checkpoint interval for restart dumps", ICCS 2003.
    """
    return max(0.0, math.sqrt(2 * stall_s * (mtbf_s + recovery_s)) - stall_s)


def daly_interval(stall_s: float, mtbf_s: float) -> float:
    """Return Daly's higher order estimate of the best interval (FGCS 22(3), 2006).

    sqrt(2 w M) (1 + sqrt(f)/3 + f/9) - w with f = w / (2 M), and M where w >= 2 M.
    """
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    f = stall_s / (2 * mtbf_s)
    return young_interval(stall_s, mtbf_s) * (1 + math.sqrt(f) / 3 + f / 9) - stall_s


def best_interval(stall_s: float, mtbf_s: float) -> float:
    """Return the interval with the highest `ettr`, to the precision of a float; infinite if nothing ever fails.

    Where the derivative of the complete model is 0, x = tau/M solves (1 - x) e^x = e^(-w/M), whose only solution above
    0 is found by Newton's method from Daly's estimate. Recovery and persist time do not move it: they cost each
    failure the same.
    """
    if stall_s <= 0:
        return 0.0
    if math.isinf(mtbf_s):
        return math.inf
    ratio = stall_s / mtbf_s
    x = daly_interval(stall_s, mtbf_s) / mtbf_s
    if ratio < _SMALL:
        return x * mtbf_s
    target = math.exp(-ratio)
    for _ in range(_NEWTON_STEPS):
        step = ((1 - x) * math.exp(x) - target) / (x * math.exp(x))
        x = min(1.0, x + step)
        if abs(step) <= 1e-14:
            break
    return x * mtbf_s


def lost_to_failure(interval_s: float, *, stall_s: float, persist_s: float) -> float:
    """Return the most work, in seconds, that one failure can cost: all since the newest save that is durable."""
    return interval_s + max(stall_s, persist_s)
