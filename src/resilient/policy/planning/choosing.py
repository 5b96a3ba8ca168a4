"""The interval that a plan or a run takes: the best one, within what saves may cost and what may be lost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from resilient.policy.planning.closed_form import best_interval

OVERHEAD_BUDGET: Final = 0.05
"""The share of the time that saving may take, unless somebody sets another: CheckFreq uses no more than 3.5 to 5 %.

J. Mohan, A. Phanishayee, V. Chidambaram, "CheckFreq: Frequent, Fine-Grained DNN Checkpointing", FAST 2021. A lower one
would cost more than it saves where failures are frequent: 5 s of stall every 2 min are 4 %, and the optimum of 100,000
GPUs.
"""

PERSIST_MARGIN: Final = 1.25
"""From the start of a save to the next one, in times of what a save needs to be durable: that varies."""

_AIM: Final = 0.9
"""The part of the budget that is aimed at: what a save costs is an estimate, and one out of line is not in it."""

_LEAST_S: Final = 1.0


class Limit(StrEnum):
    """What the interval is what it is for."""

    OPTIMUM = "optimum"
    BUDGET = "overhead budget"
    PERSIST = "persist time"
    RPO = "rpo"
    GIVEN = "given"
    SHORTEST = "shortest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """From the start of one save to that of the next: ``period_s``, and why.

    ``overhead``: the share of it that is stall. ``loss_s``: the age of the state that a failure leaves, at most.
    """

    period_s: float
    limit: Limit
    overhead: float
    loss_s: float


def choose(
    *,
    stall_s: float,
    persist_s: float,
    mtbf_s: float,
    budget: float = OVERHEAD_BUDGET,
    rpo_s: float | None = None,
    worst_persist_s: float | None = None,
    late_s: float = 0.0,
) -> Choice:
    """Return when to save next, counted from the start of the last save.

    The optimum of `resilient.policy.planning.closed_form.best_interval`, but no more stall than ``budget``, a share of
    the time, and no save before the last one is durable: two would share the way to the store, and both be late.

    ``rpo_s``, the objective for the age of the state that a failure leaves, comes before budget and optimum. Just
    before a save is durable, what counts is the one before it, so the period has to be as much shorter as a save needs
    at worst (``worst_persist_s``) and starts too late (``late_s``: it waits for the end of a step). It cannot be met
    where that leaves less than a save needs; the period is then the shortest that keeps saves apart, and ``loss_s``
    says what that gives.
    """
    worst_s = max(persist_s, stall_s, worst_persist_s or 0.0)
    bounds = {
        Limit.OPTIMUM: best_interval(stall_s, mtbf_s) + stall_s,
        Limit.BUDGET: stall_s / (_AIM * budget),
        Limit.PERSIST: max(PERSIST_MARGIN * persist_s, _LEAST_S),
    }
    limit = max(bounds, key=lambda each: bounds[each])
    period_s = bounds[limit]
    if rpo_s is not None and period_s + worst_s + late_s > rpo_s:
        period_s, limit = rpo_s - worst_s - late_s, Limit.RPO
        floor_s = max(persist_s, stall_s, _LEAST_S)
        if period_s < floor_s:
            period_s, limit = floor_s, Limit.PERSIST
    return Choice(period_s=period_s, limit=limit, overhead=stall_s / period_s, loss_s=period_s + worst_s + late_s)


def about_objective(choice: Choice, *, rpo_s: float, budget: float) -> tuple[str, str]:
    """Say what is to be known of an objective: one word that stays the same as long as that does, and a sentence.

    Both are empty if it is met within the budget.
    """
    if choice.loss_s > rpo_s * (1 + 1e-9):
        apart = f"saves start {choice.period_s:.3g} s apart, and cannot start sooner"
        return "missed", (
            f"rpo: {rpo_s:g} s cannot be met: a failure may leave a state of {choice.loss_s:.3g} s ago ({apart}); "
            "make saves durable sooner (a nearer or faster store, tiers), or set a longer rpo"
        )
    if choice.overhead > budget * (1 + 1e-9):
        return "costly", (
            f"rpo: {rpo_s:g} s is met, and costs {100 * choice.overhead:.1f} % of the time, more than the budget of "
            f"{100 * budget:g} %: a longer rpo, or a shorter stall, would cost less"
        )
    return "", ""
