"""The formulas give what was published, agree with each other where they must, and with a simulation everywhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.policy.planning.closed_form import (
    best_interval,
    daly_first_order,
    daly_interval,
    ettr,
    lost_to_failure,
    mtbf_of,
    rsc_ettr,
    young_interval,
)
from resilient.policy.planning.monte_carlo import Tiers, simulate
from tests.figures import Figures

RATES = {"Llama 3": 3.79, "RSC-1": 6.50, "RSC-2": 2.34}
COSTS = {"sync 5 min, R 20 min": (300, 1200), "30 s, 10 min": (30, 600), "5 s, 5 min": (5, 300)}
COSTS |= {"1 s, 2 min": (1, 120), "1 s, 30 s": (1, 30)}


def mtbf(gpus: int, rate: float) -> float:
    return mtbf_of(gpus, gpus_per_node=8, failures_per_1000_node_days=rate)


def test_the_mean_time_between_failures_is_the_published_one() -> None:
    assert mtbf(16_384, 3.79) / 60 == pytest.approx(185, abs=1)
    assert mtbf(100_000, 2.34) / 60 == pytest.approx(49.2, abs=0.1)
    assert mtbf(100_000, 6.50) / 60 == pytest.approx(17.7, abs=0.1)
    assert mtbf(9, 1000) == 43_200, "a node that is used in part fails as a whole"
    assert mtbf(8, 0) == math.inf


def test_what_meta_says_of_100_000_gpus_comes_out() -> None:
    """Kokolis et al.: ETTR 0.9 needs about 2 min between saves and 2 min of restart, at RSC-2's rate."""
    how = {"stall_s": 5, "mtbf_s": mtbf(100_000, 2.34), "recovery_s": 120}
    assert ettr(120, **how) == pytest.approx(0.90, abs=0.01)
    assert rsc_ettr(120, **how) == pytest.approx(0.901, abs=0.001)
    assert rsc_ettr(120, **{**how, "stall_s": 10}) == pytest.approx(0.867, abs=0.001)


def test_at_100_000_gpus_saves_that_hold_up_training_leave_little_of_it() -> None:
    """A table that was calculated before this package had a planner, at the rates of three clusters."""
    known = {"Llama 3": (0.27, 0.60, 0.79, 0.91, 0.95), "RSC-1": (0.14, 0.44, 0.68, 0.86, 0.93)}
    known |= {"RSC-2": (0.41, 0.71, 0.85, 0.94, 0.96)}
    for name, shares in known.items():
        mtbf_s = mtbf(100_000, RATES[name])
        for share, (stall_s, recovery_s) in zip(shares, COSTS.values(), strict=True):
            best_s = best_interval(stall_s, mtbf_s)
            found = ettr(best_s, stall_s=stall_s, mtbf_s=mtbf_s, recovery_s=recovery_s)
            assert found == pytest.approx(share, abs=0.0051), (name, stall_s)


@pytest.mark.proof
def test_the_closed_form_is_within_0_005_of_a_simulation_in_45_settings(
    count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    found = figures("plan-closed-form", "closed form against Monte Carlo, 3 sizes x 3 rates x 5 costs")
    if len(found):
        return
    histories, largest = count(500, 5000), 0.0
    settings = list(itertools.product((1_024, 16_384, 100_000), RATES.values(), COSTS.values()))
    for seed, (gpus, rate, (stall_s, recovery_s)) in enumerate(settings):
        mtbf_s = mtbf(gpus, rate)
        interval_s = daly_interval(stall_s, mtbf_s)
        closed = ettr(interval_s, stall_s=stall_s, mtbf_s=mtbf_s, recovery_s=recovery_s)
        tiers = Tiers(mtbf_s=mtbf_s, interval_s=interval_s, stall_s=stall_s, near_recovery_s=recovery_s)
        simulated = simulate(tiers, histories=histories, seed=seed)
        assert simulated.half_width < 0.0025, "else 0.005 would say little"
        largest = max(largest, abs(closed - simulated.mean))
        assert abs(closed - simulated.mean) <= 0.005, (gpus, rate, stall_s, closed, simulated)
    assert len(settings) == 45
    found.add(settings=45, failures=histories * 200, largest_difference=round(largest, 5))


@pytest.mark.parametrize("persist_s", [1.0, 40.0, 300.0])
@pytest.mark.parametrize("detection_s", [0.0, 600.0])
def test_late_durability_and_detection_cost_what_a_simulation_says(persist_s: float, detection_s: float) -> None:
    how = {"stall_s": 1.0, "mtbf_s": 1800.0, "detection_s": detection_s}
    closed = ettr(300, **how, recovery_s=120, persist_s=persist_s)
    tiers = Tiers(
        stall_s=1, mtbf_s=1800, detection_s=detection_s, interval_s=300, near_recovery_s=120, near_lag_s=persist_s
    )
    simulated = simulate(tiers, seed=7)
    assert abs(closed - simulated.mean) < 2 * simulated.half_width < 0.004


@given(st.floats(0.001, 1e4), st.floats(60, 1e8))
def test_no_interval_is_better_than_the_best(stall_s: float, mtbf_s: float) -> None:
    best_s = best_interval(stall_s, mtbf_s)

    def share(interval_s: float) -> float:
        return ettr(interval_s, stall_s=stall_s, mtbf_s=mtbf_s, recovery_s=60, persist_s=3 * stall_s)

    at_best = share(best_s)
    for factor in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0):
        assert at_best >= share(best_s * factor) * (1 - 1e-12)


def test_estimates_of_the_best_interval_come_closer_with_each_paper() -> None:
    stall_s, mtbf_s = 300.0, 3600.0
    best_s = best_interval(stall_s, mtbf_s)
    young, daly = young_interval(stall_s, mtbf_s), daly_interval(stall_s, mtbf_s)
    assert young == pytest.approx(1469.7, abs=0.1)
    assert abs(daly - best_s) < 5 < abs(young - best_s)
    assert daly_first_order(stall_s, mtbf_s, recovery_s=0) == pytest.approx(young - stall_s)
    assert daly_interval(10_000, 3600) == 3600


@given(st.floats(1e-3, 1e3), st.floats(1e4, 1e9))
def test_where_saves_are_cheap_all_formulas_agree(stall_s: float, mtbf_s: float) -> None:
    if stall_s > 1e-3 * mtbf_s:
        return
    best_s = best_interval(stall_s, mtbf_s)
    assert best_s == pytest.approx(young_interval(stall_s, mtbf_s), rel=0.03)
    how = {"stall_s": stall_s, "mtbf_s": mtbf_s, "recovery_s": 1e-3 * mtbf_s}
    assert ettr(best_s, **how) == pytest.approx(rsc_ettr(best_s, **how), abs=0.005)


def test_extremes() -> None:
    assert ettr(10, stall_s=1, mtbf_s=math.inf, recovery_s=60) == pytest.approx(10 / 11)
    assert ettr(0, stall_s=1, mtbf_s=60, recovery_s=60) == 0
    assert ettr(1e6, stall_s=1, mtbf_s=60, recovery_s=60) == 0
    assert best_interval(1, math.inf) == math.inf
    assert best_interval(0, 60) == 0
    assert best_interval(1e6, 60) == pytest.approx(60), "a save that takes longer than a failure comes"
    assert lost_to_failure(100, stall_s=5, persist_s=60) == 160
