"""What a job may expect: its share of productive time, its best interval, and what would help most."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from resilient.policy.planning.choosing import OVERHEAD_BUDGET, PERSIST_MARGIN, Limit, choose
from resilient.policy.planning.closed_form import ettr, mtbf_of
from resilient.policy.planning.monte_carlo import Tiers, simulate
from resilient.policy.planning.spares import failure_probability, spare_nodes

_HISTORIES: Final = 2000
_CURVE_HISTORIES: Final = 400
_POINTS: Final = 25
_MOST_SAVES: Final = 400  # between two of the store, in the curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """A tier of checkpoints on the nodes, or in the memory of their neighbors.

    ``interval_s``: training between two saves to it; None: the best. ``survives``: in this share of failures it is
    there afterwards; then recovery takes ``recovery_s``.
    """

    interval_s: float | None = None
    survives: float = 0.9
    recovery_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a training needs and meets with; times in seconds.

    ``persist_s``: from the start of a save until it is in the store. ``recovery_s``: from the detection of a failure
    until training goes on from the store. ``budget``: the share of the time that saving may take. With ``near``, each
    save goes to the nodes, and some of those on to the store, for no further stall.
    """

    gpus: int
    gpus_per_node: int
    failures_per_1000_node_days: float
    stall_s: float
    recovery_s: float
    persist_s: float | None = None
    detection_s: float = 0.0
    budget: float = OVERHEAD_BUDGET
    near: Near | None = None

    @property
    def nodes(self) -> int:
        return math.ceil(self.gpus / self.gpus_per_node)

    @property
    def mtbf_s(self) -> float:
        return mtbf_of(
            self.gpus,
            gpus_per_node=self.gpus_per_node,
            failures_per_1000_node_days=self.failures_per_1000_node_days,
        )

    @property
    def durable_s(self) -> float:
        """From the start of a save until it counts: never less than its stall."""
        return max(self.stall_s, self.persist_s or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best training time between two saves: to the store, and to the nodes (None: there is no such tier)."""

    interval_s: float
    near_interval_s: float | None
    limit: Limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """What a change would bring, with the interval that is best then."""

    what: str
    ettr: float
    gpu_hours_a_day: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a job may expect at ``interval_s``. Shares of the wall clock; ``half_width``: of a simulation, else 0.

    ``curve``: ETTR by interval. ``spares``: nodes that suffice on 99 of 100 days to replace all that fail.
    """

    mtbf_s: float
    interval_s: float
    near_interval_s: float | None
    ettr: float
    half_width: float
    best: Best
    best_ettr: float
    gpu_hours_lost_a_day: float
    spares: int
    improvements: tuple[Improvement, ...]
    curve: tuple[tuple[float, float], ...]


def look(job: Job, interval_s: float | None = None) -> Outlook:
    """Return what a job may expect that saves to the store every ``interval_s`` of training; None: at best."""
    best = best_of(job)
    chosen_s = best.interval_s if interval_s is None else interval_s
    mean, half_width = expected(job, chosen_s)
    best_ettr = mean if chosen_s == best.interval_s else expected(job, best.interval_s)[0]
    return Outlook(
        mtbf_s=job.mtbf_s,
        interval_s=_rounded(job, chosen_s),
        near_interval_s=best.near_interval_s,
        ettr=mean,
        half_width=half_width,
        best=best,
        best_ettr=best_ettr,
        gpu_hours_lost_a_day=24 * job.gpus * (1 - mean),
        spares=spare_nodes(job.nodes, probability=failure_probability(job.failures_per_1000_node_days)),
        improvements=_improvements(job, interval_s, mean, best_ettr),
        curve=_curve(job, best, chosen_s),
    )


def best_of(job: Job) -> Best:
    """Return the best intervals, within budget and persist time.

    With a near tier, that is the best for it, and to the store as often as persisting allows: it stalls nothing more.
    """
    if job.near is None:
        choice = choose(stall_s=job.stall_s, persist_s=job.persist_s or 0.0, mtbf_s=job.mtbf_s, budget=job.budget)
        return Best(interval_s=choice.period_s - job.stall_s, near_interval_s=None, limit=choice.limit)
    near_s, limit = job.near.interval_s, Limit.PERSIST
    if near_s is None:
        choice = choose(stall_s=job.stall_s, persist_s=0.0, mtbf_s=job.mtbf_s, budget=job.budget)
        near_s = choice.period_s - job.stall_s
    saves = math.ceil(PERSIST_MARGIN * job.durable_s / (near_s + job.stall_s))
    if saves <= 1:
        saves, limit = 1, Limit.OPTIMUM
    return Best(interval_s=saves * near_s, near_interval_s=near_s, limit=limit)


def expected(job: Job, interval_s: float, *, histories: int = _HISTORIES) -> tuple[float, float]:
    """Return the expected ETTR, and half the width of its 95 % confidence interval where it is simulated."""
    if job.near is None:
        mean = ettr(
            interval_s,
            stall_s=job.stall_s,
            mtbf_s=job.mtbf_s,
            recovery_s=job.recovery_s,
            persist_s=job.persist_s,
            detection_s=job.detection_s,
        )
        return mean, 0.0
    near_s = best_of(job).near_interval_s
    assert near_s is not None, "there is a near tier"
    tiers = Tiers(
        mtbf_s=job.mtbf_s,
        interval_s=near_s,
        stall_s=job.stall_s,
        near_recovery_s=job.near.recovery_s,
        survives=job.near.survives,
        every=_saves(interval_s, near_s),
        store_recovery_s=job.recovery_s,
        store_lag_s=job.durable_s,
        detection_s=job.detection_s,
    )
    found = simulate(tiers, histories=histories)
    return found.mean, found.half_width


def _saves(interval_s: float, near_s: float) -> int:
    return max(1, round(interval_s / near_s))


def _rounded(job: Job, interval_s: float) -> float:
    """Return an interval as it comes about: with a near tier, a multiple of its own."""
    near_s = best_of(job).near_interval_s
    return interval_s if near_s is None else _saves(interval_s, near_s) * near_s


def _improvements(job: Job, interval_s: float | None, now: float, best: float) -> tuple[Improvement, ...]:
    changes = {
        "half the stall of a save": replace(job, stall_s=job.stall_s / 2),
        "half the failures": replace(job, failures_per_1000_node_days=job.failures_per_1000_node_days / 2),
    }
    if job.recovery_s:
        near = None if job.near is None else replace(job.near, recovery_s=job.near.recovery_s / 2)
        changes["half the recovery time"] = replace(job, recovery_s=job.recovery_s / 2, near=near)
    if job.detection_s:
        changes["half the detection time"] = replace(job, detection_s=job.detection_s / 2)
    if job.persist_s is not None and job.persist_s > job.stall_s:
        changes["half the persist time"] = replace(job, persist_s=job.persist_s / 2)
    if job.near is None:
        near = Near(recovery_s=job.recovery_s / 3)
        changes["a tier on the nodes (survives 90 %, a third of the recovery time)"] = replace(job, near=near)
    found = {what: expected(changed, best_of(changed).interval_s)[0] for what, changed in changes.items()}
    if interval_s is not None:
        found["the best interval"] = best
    ordered = sorted(found.items(), key=lambda each: -each[1])
    return tuple(
        Improvement(what=what, ettr=value, gpu_hours_a_day=24 * job.gpus * (value - now)) for what, value in ordered
    )


def _curve(job: Job, best: Best, chosen_s: float) -> tuple[tuple[float, float], ...]:
    """Return ETTR by interval, evenly on a logarithmic scale, with the best and the chosen interval among them."""
    if best.near_interval_s is None:
        low_s, high_s = min(best.interval_s, chosen_s) / 8, max(best.interval_s, chosen_s) * 8
        grid = {low_s * (high_s / low_s) ** (i / (_POINTS - 1)) for i in range(_POINTS)}
        points = sorted({*grid, best.interval_s, chosen_s})
    else:
        near_s = best.near_interval_s
        counts = {round(_MOST_SAVES ** (i / (_POINTS - 1))) for i in range(_POINTS)}
        points = sorted({count * near_s for count in counts} | {best.interval_s, _rounded(job, chosen_s)})
    return tuple((each, expected(job, each, histories=_CURVE_HISTORIES)[0]) for each in points)
