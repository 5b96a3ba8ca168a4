"""What a job may expect: its share of productive time, its best interval, and what would help most."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from resilient.policy.planning.choosing import Limit, choose
from resilient.policy.planning.closed_form import best_interval, ettr, mtbf_of
from resilient.policy.planning.monte_carlo import Tiers, simulate
from resilient.policy.planning.spares import failure_probability, spare_nodes

_HISTORIES: Final = 2000
_CURVE_HISTORIES: Final = 400
_POINTS: Final = 25
_SHORTEST_S: Final = 1.0  # where nothing but the length of a step limits how often to save
_ROUNDING: Final = 1e-9


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
    until training goes on from the store. ``budget``: the share of the time that saving may take; None: whatever is
    best. With ``near``, each save goes to the nodes, and some of those on to the store, for no further stall.
    """

    gpus: int
    gpus_per_node: int
    failures_per_1000_node_days: float
    stall_s: float
    recovery_s: float
    persist_s: float | None = None
    detection_s: float = 0.0
    budget: float | None = None
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
class Pace:
    """Training time between two saves: to the store, and to the nodes (None: there is no such tier)."""

    interval_s: float
    near_interval_s: float | None = None

    @property
    def saves(self) -> int:
        """One of so many goes to the store."""
        return 1 if self.near_interval_s is None else max(1, round(self.interval_s / self.near_interval_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Best(Pace):
    """The best pace, and what makes each of its intervals that: ``limit`` of the one to the store."""

    limit: Limit
    near_limit: Limit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """What ``every="auto"`` takes with its own budget and margin, where that is not the best."""

    interval_s: float
    ettr: float
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

    ``auto``: None where that is as good. ``improvements``: the best first, and only what helps. ``curve``: ETTR by
    interval. ``spares``: nodes that suffice on 99 of 100 days to replace all that fail.
    """

    mtbf_s: float
    interval_s: float
    near_interval_s: float | None
    ettr: float
    half_width: float
    best: Best
    best_ettr: float
    auto: Auto | None
    gpu_hours_lost_a_day: float
    spares: int
    improvements: tuple[Improvement, ...]
    curve: tuple[tuple[float, float], ...]


def look(job: Job, interval_s: float | None = None) -> Outlook:
    """Return what a job may expect that saves to the store every ``interval_s`` of training; None: at best.

    With a near tier whose interval is given, the nearest multiple of that; else the near interval is what goes into
    ``interval_s`` and is nearest to the best one.
    """
    best = best_of(job, shortest_s=_SHORTEST_S if interval_s is None else min(_SHORTEST_S, interval_s))
    chosen = best if interval_s is None else pace_of(job, interval_s, best)
    mean, half_width = expected(job, chosen)
    best_ettr = mean if chosen == best else expected(job, best)[0]
    return Outlook(
        mtbf_s=job.mtbf_s,
        interval_s=chosen.interval_s,
        near_interval_s=chosen.near_interval_s,
        ettr=mean,
        half_width=half_width,
        best=best,
        best_ettr=best_ettr,
        auto=_auto(job, best, best_ettr),
        gpu_hours_lost_a_day=24 * job.gpus * (1 - mean),
        spares=spare_nodes(job.nodes, probability=failure_probability(job.failures_per_1000_node_days)),
        improvements=_improvements(job, mean, {} if interval_s is None else {"the best interval": best_ettr}),
        curve=_curve(job, best, chosen),
    )


def best_of(job: Job, *, shortest_s: float = _SHORTEST_S) -> Best:
    """Return the best pace with which no save begins before the last one is in the store, within the budget if any.

    ``shortest_s`` is what is planned where a save stalls nothing, so that there is no optimum above 0.
    """
    if job.near is not None:
        return _best_with_near(job, job.near, shortest_s)
    interval_s, limit = _best_interval(job, job.mtbf_s, shortest_s, apart_s=job.durable_s)
    return Best(interval_s=interval_s, limit=limit)


def _best_interval(job: Job, mtbf_s: float, shortest_s: float, *, apart_s: float = 0.0) -> tuple[float, Limit]:
    """Return the best training time between saves that begin no less than ``apart_s`` apart, and what makes it that."""
    bounds = {
        Limit.OPTIMUM: best_interval(job.stall_s, mtbf_s),
        Limit.BUDGET: 0.0 if job.budget is None else job.stall_s / job.budget - job.stall_s,
        Limit.PERSIST: apart_s - job.stall_s,
        Limit.SHORTEST: 0.0 if job.stall_s else shortest_s,
    }
    limit = max(bounds, key=lambda each: bounds[each])
    return bounds[limit], limit


def _best_with_near(job: Job, near: Near, shortest_s: float) -> Best:
    """Return the best pace with two tiers: to the store as often as persisting allows, for that stalls nothing more.

    What the near tier loses are failures that it survives, so it is their rate that makes its interval; and one of
    which a whole number fits into the persist time may be better than that, as more of the work is in the store.
    """
    if near.interval_s is not None:
        return _with_near(job, near.interval_s, Limit.GIVEN)
    near_s, limit = _best_interval(job, job.mtbf_s, shortest_s)
    if near_s + job.stall_s >= job.durable_s:
        return _with_near(job, near_s, limit)
    floor_s = 0.0 if job.stall_s else shortest_s
    if job.budget is not None:
        floor_s = max(floor_s, job.stall_s / job.budget - job.stall_s)
    if near.survives:
        near_s, limit = _best_interval(job, job.mtbf_s / near.survives, shortest_s)
    apart_s = job.durable_s - job.stall_s  # so that each of them can go to the store
    found = {near_s: limit} if near_s < apart_s else {apart_s: Limit.PERSIST}
    saves = max(1, math.ceil(job.durable_s / (near_s + job.stall_s)))
    for fitting in {saves, max(1, saves - 1)}:
        fitting_s = max(floor_s, job.durable_s / fitting - job.stall_s)
        if fitting_s > 0:
            found.setdefault(fitting_s, Limit.PERSIST)
    paces = [_with_near(job, each_s, each) for each_s, each in found.items()]
    return max(paces, key=lambda pace: expected(job, pace, histories=_CURVE_HISTORIES)[0])


def _with_near(job: Job, near_s: float, limit: Limit) -> Best:
    saves = _least_saves(job, near_s)
    return Best(
        interval_s=saves * near_s,
        near_interval_s=near_s,
        limit=limit if saves == 1 else Limit.PERSIST,
        near_limit=limit,
    )


def _least_saves(job: Job, near_s: float) -> int:
    """Return of how many saves to the nodes one may go to the store, so that each is there before the next begins."""
    return max(1, math.ceil(job.durable_s / (near_s + job.stall_s) - _ROUNDING))


def pace_of(job: Job, interval_s: float, best: Best) -> Pace:
    """Return the pace of a job that is to save to the store every ``interval_s``, as close to that as can be."""
    if best.near_interval_s is None:
        return Pace(interval_s=interval_s)
    saves = max(1, round(interval_s / best.near_interval_s))
    if best.near_limit is not Limit.GIVEN:
        return Pace(interval_s=interval_s, near_interval_s=interval_s / saves)
    saves = max(saves, _least_saves(job, best.near_interval_s))
    return Pace(interval_s=saves * best.near_interval_s, near_interval_s=best.near_interval_s)


def overlaps(job: Job, pace: Pace) -> bool:
    """Whether a save would begin before the last one is in the store."""
    return pace.interval_s + pace.saves * job.stall_s < job.durable_s * (1 - _ROUNDING)


def _auto(job: Job, best: Best, best_ettr: float) -> Auto | None:
    if job.near is not None or job.budget is not None:
        return None
    choice = choose(stall_s=job.stall_s, persist_s=job.persist_s or 0.0, mtbf_s=job.mtbf_s)
    interval_s = choice.period_s - job.stall_s
    if choice.limit is Limit.OPTIMUM or interval_s <= best.interval_s:
        return None
    share = expected(job, Pace(interval_s=interval_s))[0]
    return Auto(interval_s=interval_s, ettr=share, limit=choice.limit) if share < best_ettr else None


def expected(job: Job, pace: Pace, *, histories: int = _HISTORIES) -> tuple[float, float]:
    """Return the expected ETTR, and half the width of its 95 % confidence interval where it is simulated."""
    if job.near is None:
        mean = ettr(
            pace.interval_s,
            stall_s=job.stall_s,
            mtbf_s=job.mtbf_s,
            recovery_s=job.recovery_s,
            persist_s=job.persist_s,
            detection_s=job.detection_s,
        )
        return mean, 0.0
    assert pace.near_interval_s is not None, "there is a near tier"
    tiers = Tiers(
        mtbf_s=job.mtbf_s,
        interval_s=pace.near_interval_s,
        stall_s=job.stall_s,
        near_recovery_s=job.near.recovery_s,
        survives=job.near.survives,
        every=pace.saves,
        store_recovery_s=job.recovery_s,
        store_lag_s=job.durable_s,
        detection_s=job.detection_s,
    )
    found = simulate(tiers, histories=histories)
    return found.mean, found.half_width


def _improvements(job: Job, now: float, others: dict[str, float]) -> tuple[Improvement, ...]:
    """Return what would help, of the changes with their best paces and of ``others``, shares by what they are of."""
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
    elif job.near.interval_s is not None:
        changes["the best interval to the tier on the nodes"] = replace(job, near=replace(job.near, interval_s=None))
    found = others | {what: expected(changed, best_of(changed))[0] for what, changed in changes.items()}
    ordered = sorted(found.items(), key=lambda each: -each[1])
    return tuple(
        Improvement(what=what, ettr=value, gpu_hours_a_day=24 * job.gpus * (value - now))
        for what, value in ordered
        if value > now
    )


def _curve(job: Job, best: Best, chosen: Pace) -> tuple[tuple[float, float], ...]:
    """Return ETTR by interval, evenly on a logarithmic scale, with the best and the chosen interval among them.

    Only intervals that can be: of those with which saves overlap, the model would promise too much.
    """
    low_s, high_s = min(best.interval_s, chosen.interval_s), max(best.interval_s, chosen.interval_s) * 8
    if Limit.SHORTEST not in (best.limit, best.near_limit):
        low_s /= 8
    grid = [low_s * (high_s / low_s) ** (i / (_POINTS - 1)) for i in range(_POINTS)]
    paces = {pace.interval_s: pace for pace in (pace_of(job, each_s, best) for each_s in grid)}
    paces = {interval_s: pace for interval_s, pace in paces.items() if not overlaps(job, pace)}
    paces |= {pace.interval_s: pace for pace in (chosen, best)}
    return tuple((each, expected(job, paces[each], histories=_CURVE_HISTORIES)[0]) for each in sorted(paces))
