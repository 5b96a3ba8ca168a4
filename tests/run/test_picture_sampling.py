"""Looks fall on the same steps of all ranks, not in the rhythm of anything, and cost no more than they may."""

from __future__ import annotations

import math

import pytest

from resilient.run.picture_sampling import BUDGET, Looks

STEPS = 100_000


def looked(looks: Looks) -> list[int]:
    return [step for step in range(STEPS) if looks.due(step)]


def test_a_rank_with_a_longer_period_looks_at_some_of_the_steps_of_the_others() -> None:
    quick, slow, other = Looks("1-a", every=20), Looks("1-a", every=20), Looks("2-b", every=20)
    slow.took(30 * BUDGET * 0.5, 0.0, 0.5)
    assert slow.period == 40
    assert set(looked(slow)) < set(looked(quick))
    assert len(set(looked(other)) & set(looked(quick))) < 0.1 * STEPS / 20, "another life looks at others"


def test_looks_are_at_random() -> None:
    steps = looked(Looks("1-a", every=20))
    assert len(steps) == pytest.approx(STEPS / 20, abs=5 * math.sqrt(STEPS / 20))
    for every in (5, 7, 25, 64, 100):  # of saves, say
        share = sum(step % every == 0 for step in steps) / len(steps)
        assert share == pytest.approx(1 / every, abs=0.03)


@pytest.mark.parametrize("cost_s", [0.001, 0.01, 0.3])
@pytest.mark.parametrize("step_s", [0.005, 0.3, 20.0])
def test_the_budget_is_kept(cost_s: float, step_s: float) -> None:
    looks = Looks("1-a", every=20)
    for _ in range(3):
        looks.took(cost_s, 0.0, step_s)
    assert cost_s / (looks.period * step_s) <= BUDGET
    assert looks.period == 20 or cost_s / (looks.period / 2 * step_s) > BUDGET, "and no more rarely than needed"


def test_what_steps_took_longer_counts_once_it_is_more_than_noise() -> None:
    looks = Looks("1-a", every=20)
    for longer_s in (9.0, -1.0, 10 * BUDGET, 8.0):
        looks.took(BUDGET, longer_s, 1.0)
        assert looks.period == 20
    looks.took(BUDGET, 500 * BUDGET, 1.0)
    assert looks.period == 640
    for _ in range(5):
        looks.took(BUDGET, 0.0, 1.0)
    assert looks.period == 20, "and what was is forgotten"
