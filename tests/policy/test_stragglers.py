"""A slow rank is named with what it is slow in, if that lasts; a healthy one never."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median

import pytest

from resilient.policy.stragglers import Straggler, Stragglers
from tests.figures import Figures

RANKS, TURNS, STEP_S, COMPUTE_S, DATA_S = 8, 20, 0.2, 0.08, 0.01


def report(draw: random.Random, slow: int | None = None, section: str = "compute") -> dict[int, dict[str, float]]:
    """Return the medians of one report: 15 % of jitter, and now and then a turn that takes five times as long."""
    found = {}
    for rank in range(RANKS):
        sections = {}
        for name, base_s in (("compute", COMPUTE_S), ("data", DATA_S)):
            factor = 1.5 if rank == slow and name == section else 1.0
            times = [base_s * factor * draw.lognormvariate(0, 0.15) for _ in range(TURNS)]
            sections[name] = median(time * (5 if draw.random() < 0.05 else 1) for time in times)
        found[rank] = {**sections, "step": STEP_S}
    return found


@pytest.mark.proof
def test_a_rank_that_computes_1_5_times_as_long_is_named_and_no_healthy_one(
    count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    kept = figures("stragglers-scored", "a rank slowed 1.5 times in simulated reports, and healthy ones")
    for number in range(len(kept), count(20, 200)):
        draw = random.Random(number)
        slow = draw.randrange(RANKS)
        rule = Stragglers()
        named = [each for _ in range(6) for each in rule.take(report(draw, slow))]
        assert [(each.rank, each.section) for each in named] == [(slow, "compute")], f"seed {number}"
        healthy = Stragglers()
        flagged = [each for _ in range(5) for each in healthy.take(report(draw))]
        assert flagged == [], f"seed {number}"
        kept.add(slow=slow, score=named[0].score, healthy_reports=5, flagged=len(flagged))


def of(*compute_s: float, data_s: float = 0.001) -> dict[int, dict[str, float]]:
    return {rank: {"compute": each, "data": data_s, "step": 1.0} for rank, each in enumerate(compute_s)}


def test_it_has_to_last_for_three_reports_and_is_said_once() -> None:
    rule = Stragglers()
    said = [rule.take(of(0.2, 0.2, slow)) for slow in (0.4, 0.4, 0.2, 0.4, 0.4, 0.4, 0.4, 0.2, 0.4, 0.4, 0.4)]
    found = Straggler(rank=2, section="compute", own_s=0.4, best_s=0.2, reports=3)
    assert said == [[found] if number in (5, 10) else [] for number in range(11)]
    assert found.score == 0.5


def test_what_nobody_waits_for_long_is_no_matter() -> None:
    rule = Stragglers()
    data = {rank: {"data": 0.00002 * (1 + rank), "step": 0.2} for rank in range(4)}
    assert [rule.take(data) for _ in range(4)] == [[]] * 4


def test_the_loader_of_one_rank_is_named_as_such() -> None:
    rule = Stragglers()
    slow = {rank: {"compute": 0.1, "data": 0.5 if rank == 1 else 0.001, "step": 1.0} for rank in range(4)}
    (named,) = [each for _ in range(3) for each in rule.take(slow)]
    assert (named.rank, named.section) == (1, "data")
