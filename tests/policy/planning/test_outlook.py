from __future__ import annotations

from dataclasses import replace

import pytest

from resilient.policy.planning.choosing import Limit
from resilient.policy.planning.closed_form import best_interval, ettr
from resilient.policy.planning.outlook import Job, Near, best_of, expected, look
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
    assert (slow.interval_s, slow.limit) == (745, Limit.PERSIST)
    frugal = best_of(replace(JOB, budget=0.01))
    assert frugal.limit is Limit.BUDGET
    assert 5 / (frugal.interval_s + 5) <= 0.01


def test_a_tier_on_the_nodes_pays_and_is_simulated() -> None:
    slow = replace(JOB, persist_s=300, detection_s=10)
    two = replace(slow, near=Near(interval_s=60, survives=0.9, recovery_s=30))
    found = look(two, 610)
    assert found.interval_s == 600, "a multiple of the near tier's"
    assert found.near_interval_s == 60
    assert 0 < found.half_width < 0.001
    assert found.ettr > expected(slow, best_of(slow).interval_s)[0] + 0.05
    assert found.best.interval_s == 360, "1.25 times 300 s, in intervals of 60 s and 5 s of stall"
    worse = look(replace(two, near=Near(interval_s=60, survives=0.5, recovery_s=30)), 610)
    assert worse.ettr < found.ettr - 0.02


def test_presets_have_sources_and_rates() -> None:
    assert PRESETS["llama3"].failures_per_1000_node_days == pytest.approx(419 / (2048 * 54) * 1000, abs=0.005)
    assert PRESETS["rsc-1-jobs"].failures_per_1000_node_days == pytest.approx(24 / 7.9 / 128 * 1000, abs=0.05)
    assert PRESETS["ft-hsdp"].failures_per_1000_node_days == pytest.approx(24 * 60 / 18 / 12_500 * 1000, abs=0.005)
    assert all("arXiv" in each.source and each.failures_per_1000_node_days for each in PRESETS.values())
