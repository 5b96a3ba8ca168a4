from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.policy.planning.choosing import OVERHEAD_BUDGET, Limit, about_objective, choose
from resilient.policy.planning.closed_form import best_interval

HOUR_S = 3600.0


def test_what_limits_the_interval_is_named() -> None:
    free = choose(stall_s=0.1, persist_s=2, mtbf_s=3 * HOUR_S)
    assert free.limit is Limit.OPTIMUM
    assert free.period_s == pytest.approx(best_interval(0.1, 3 * HOUR_S) + 0.1)
    assert choose(stall_s=300, persist_s=300, mtbf_s=HOUR_S).limit is Limit.BUDGET
    slow = choose(stall_s=0.1, persist_s=100, mtbf_s=3 * HOUR_S)
    assert (slow.limit, slow.period_s, slow.loss_s) == (Limit.PERSIST, 125, 225)
    assert choose(stall_s=0.1, persist_s=2, mtbf_s=3 * HOUR_S, rpo_s=30).limit is Limit.RPO


@given(st.floats(0, 1000), st.floats(0, 1000), st.floats(1, 1e7), st.floats(0.001, 0.5))
def test_saves_do_not_overlap_nor_take_more_than_the_budget(
    stall_s: float, persist_s: float, mtbf_s: float, budget: float
) -> None:
    choice = choose(stall_s=stall_s, persist_s=persist_s, mtbf_s=mtbf_s, budget=budget)
    assert choice.period_s >= max(1.0, 1.25 * persist_s)
    assert choice.overhead <= budget
    assert choice.overhead == pytest.approx(stall_s / choice.period_s)


@given(st.floats(0, 100), st.floats(0, 300), st.floats(60, 1e7), st.floats(1, 3000), st.floats(0, 20))
def test_an_objective_is_met_or_it_is_said_that_it_cannot_be(
    stall_s: float, persist_s: float, mtbf_s: float, rpo_s: float, late_s: float
) -> None:
    how = {"stall_s": stall_s, "persist_s": persist_s, "mtbf_s": mtbf_s}
    choice = choose(**how, rpo_s=rpo_s, late_s=late_s, worst_persist_s=1.5 * persist_s)
    kind, sentence = about_objective(choice, rpo_s=rpo_s, budget=OVERHEAD_BUDGET)
    assert choice.period_s >= max(1.0, stall_s, persist_s), "saves do not overlap even then"
    assert choice.period_s <= choose(**how).period_s or kind == "missed"
    if kind == "missed":
        assert choice.period_s == max(1.0, stall_s, persist_s), "nothing shorter would do"
        assert f"{choice.loss_s:.3g} s ago" in sentence
    else:
        assert choice.loss_s <= rpo_s * (1 + 1e-9)
        assert (kind == "costly") == (choice.overhead > OVERHEAD_BUDGET * (1 + 1e-9))


def test_an_objective_comes_before_the_budget_and_says_what_it_costs() -> None:
    choice = choose(stall_s=5, persist_s=10, mtbf_s=100 * HOUR_S, rpo_s=60)
    assert choice.period_s == 50
    kind, sentence = about_objective(choice, rpo_s=60, budget=0.05)
    assert kind == "costly"
    assert "costs 10.0 % of the time, more than the budget of 5 %" in sentence
    longer = choose(stall_s=5, persist_s=10, mtbf_s=100 * HOUR_S, rpo_s=10_000)
    assert about_objective(longer, rpo_s=10_000, budget=0.05) == ("", "")
