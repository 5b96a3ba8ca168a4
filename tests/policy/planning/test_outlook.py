from __future__ import annotations

from dataclasses import replace

import pytest

from resilient.policy.planning.choosing import Limit
from resilient.policy.planning.closed_form import best_interval, ettr
from resilient.policy.planning.outlook import Job, Near, best_of, expected, look, overlaps, pace_of
from resilient.policy.planning.presets import PRESETS

JOB = Job(gpus=100_000, gpus_per_node=8, failures_per_1000_node_days=2.34, stall_s=5, recovery_s=120)


def test_the_outlook_is_that_of_the_formulas() -> None:
    found = look(JOB, 120)
    assert found.ettr == ettr(120, stall_s=5, mtbf_s=JOB.mtbf_s, recovery_s=120)
    assert found.best.interval_s == pytest.approx(best_interval(5, JOB.mtbf_s))
    assert found.gpu_hours_lost_a_day == pytest.approx(2_400_000 * (1 - found.ettr))
    assert max(found.curve, key=lambda point: point[1]) == (found.best.interval_s, found.best_ettr)
    assert (120, found.ettr) in found.curve
    assert look(JOB).interval_s == found.best.interval_s


def test_improvements_are_sorted_and_each_helps() -> None:
    found = look(replace(JOB, detection_s=60, persist_s=100), 300)
    shares = [each.ettr for each in found.improvements]
    assert shares == sorted(shares, reverse=True)
    assert all(share > found.ettr for share in shares)
    assert len(found.improvements) == 7
    half = next(each for each in found.improvements if each.what == "half the failures")
    assert half.gpu_hours_a_day == pytest.approx(2_400_000 * (half.ettr - found.ettr))


def test_budget_and_persist_time_bound_the_best_interval() -> None:
    slow = best_of(replace(JOB, persist_s=600))
    assert (slow.interval_s, slow.limit) == (595, Limit.PERSIST), "each begins when the last one is in the store"
    frugal = best_of(replace(JOB, budget=0.01))
    assert frugal.limit is Limit.BUDGET
    assert 5 / (frugal.interval_s + 5) == pytest.approx(0.01), "all of it: a plan knows what a save costs"


def test_a_tier_on_the_nodes_pays_and_is_simulated() -> None:
    slow = replace(JOB, persist_s=300, detection_s=10)
    two = replace(slow, near=Near(interval_s=60, survives=0.9, recovery_s=30))
    found = look(two, 610)
    assert found.interval_s == 600, "a multiple of the near tier's"
    assert found.near_interval_s == 60
    assert 0 < found.half_width < 0.001
    assert found.ettr > expected(slow, best_of(slow))[0] + 0.05
    assert found.best.interval_s == 300, "no less than 300 s, in intervals of 60 s and 5 s of stall"
    worse = look(replace(two, near=Near(interval_s=60, survives=0.5, recovery_s=30)), 610)
    assert worse.ettr < found.ettr - 0.02


@pytest.mark.parametrize(
    "job",
    [
        Job(gpus=100_000, gpus_per_node=8, failures_per_1000_node_days=6.5, stall_s=10, recovery_s=300),
        replace(JOB, persist_s=600),
        replace(JOB, stall_s=0),
        replace(JOB, stall_s=60, near=Near(survives=0.2)),
        replace(JOB, persist_s=900, stall_s=30, near=Near(survives=0.9, recovery_s=40)),
    ],
    ids=["frequent failures", "slow store", "no stall", "weak tier", "tier and slow store"],
)
def test_nothing_is_better_than_the_best(job: Job) -> None:
    best, best_ettr = best_of(job), look(job).best_ettr
    for factor in (0.3, 0.7, 0.95, 1.0, 1.05, 1.4, 3.0):
        pace = pace_of(job, factor * best.interval_s, best)
        if overlaps(job, pace):
            continue
        found = look(job, pace.interval_s)
        assert found.ettr <= found.best_ettr + 2 * found.half_width
        assert all(each.gpu_hours_a_day > 0 for each in found.improvements)
        assert found.best_ettr >= best_ettr - 1e-4, "what is asked for makes the best no worse"
        curve = dict(found.curve)
        assert curve[found.best.interval_s] >= max(curve.values()) - found.half_width


def test_what_a_run_would_take_by_itself_is_told_where_it_is_not_the_best() -> None:
    often = Job(gpus=100_000, gpus_per_node=8, failures_per_1000_node_days=6.5, stall_s=10, recovery_s=300)
    auto = look(often).auto
    assert auto is not None
    assert auto.limit is Limit.BUDGET
    assert auto.interval_s == pytest.approx(10 / 0.045 - 10)
    assert auto.ettr == ettr(auto.interval_s, stall_s=10, mtbf_s=often.mtbf_s, recovery_s=300)
    assert auto.ettr < look(often).best_ettr
    slow = look(replace(JOB, persist_s=600)).auto
    assert slow is not None
    assert (slow.interval_s, slow.limit) == (745, Limit.PERSIST)
    assert look(JOB).auto is None
    assert look(replace(often, budget=0.05)).auto is None


def test_with_a_tier_on_the_nodes_the_interval_is_the_one_that_was_asked_for() -> None:
    job = Job(gpus=1024, gpus_per_node=8, failures_per_1000_node_days=6.5, stall_s=1, recovery_s=300, near=Near())
    short = look(job, 10)
    assert (short.interval_s, short.near_interval_s) == (10, 10)
    assert short.ettr == pytest.approx(10 / 11, abs=0.01)
    assert (short.best.limit, short.best.near_limit) == (Limit.OPTIMUM, Limit.OPTIMUM)
    long = look(job, 1000)
    assert (long.interval_s, long.near_interval_s) == (1000, 500), "what goes into it and is close to the best"
    frugal = best_of(replace(job, budget=0.001))
    assert (frugal.limit, frugal.near_limit) == (Limit.BUDGET, Limit.BUDGET)
    given = replace(job, near=Near(interval_s=60))
    assert (best_of(given).limit, best_of(given).near_limit) == (Limit.GIVEN, Limit.GIVEN)
    assert best_of(replace(given, persist_s=300)).limit is Limit.PERSIST
    found = look(given, 90)
    assert (found.interval_s, found.near_interval_s) == (120, 60)
    assert found.improvements[0].what == "the best interval to the tier on the nodes"
    assert found.improvements[0].ettr == pytest.approx(look(job).ettr, abs=0.001)


def test_presets_have_sources_and_rates() -> None:
    assert PRESETS["llama3"].failures_per_1000_node_days == pytest.approx(419 / (2048 * 54) * 1000, abs=0.005)
    assert PRESETS["rsc-1-jobs"].failures_per_1000_node_days == pytest.approx(24 / 7.9 / 128 * 1000, abs=0.05)
    assert PRESETS["ft-hsdp"].failures_per_1000_node_days == pytest.approx(24 * 60 / 18 / 12_500 * 1000, abs=0.005)
    assert all("arXiv" in each.source and each.failures_per_1000_node_days for each in PRESETS.values())
