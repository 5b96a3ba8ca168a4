from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.errors import UsageError
from resilient.policy.interval import (
    FIRST_SAVE_S,
    PRIOR_MTBF_S,
    SaveContext,
    SaveWhen,
    auto_interval,
    mean_time_between_failures,
    parse_every,
)
from resilient.policy.planning.closed_form import best_interval


def context(step: int = 1, since: float = 0.0, **measured: float) -> SaveContext:
    return SaveContext(step=step, since_save_s=since, **measured)


@given(st.integers(0, 10_000), st.integers(1, 100), st.integers(1, 100))
def test_step_policies_are_functions_of_the_step(step: int, one: int, other: int) -> None:
    policy = SaveWhen(steps=one) | SaveWhen(steps=other)
    assert policy.step_based
    due = step > 0 and (step % one == 0 or step % other == 0)
    assert policy.due(context(step)) == policy.at_step(step) == due
    upcoming = policy.next_step(step)
    assert upcoming is not None
    assert policy.at_step(upcoming)
    assert not any(policy.at_step(between) for between in range(step + 1, upcoming))


def test_a_combination_is_due_when_either_is() -> None:
    policy = SaveWhen(steps=10) | SaveWhen(seconds=60)
    assert not policy.step_based
    assert policy.due(context(10, since=1))
    assert policy.due(context(11, since=60))
    assert not policy.due(context(11, since=59))
    assert SaveWhen(seconds=1).next_step(5) is None


@pytest.mark.parametrize(
    ("every", "policy"),
    [
        ("auto", SaveWhen(auto=True)),
        (7, SaveWhen(steps=7)),
        ("90s", SaveWhen(seconds=90)),
        ("10min", SaveWhen(seconds=600)),
        ("1.5 h", SaveWhen(seconds=5400)),
        (SaveWhen(steps=3), SaveWhen(steps=3)),
    ],
    ids=str,
)
def test_every_is_a_policy(every: str | int | SaveWhen, policy: SaveWhen) -> None:
    assert parse_every(every) == policy


@pytest.mark.parametrize("every", ["", "often", "10", "-3s", "0s", 0, -1, True, 2.5, None], ids=repr)
def test_what_is_no_policy_is_refused(every: object) -> None:
    with pytest.raises(UsageError, match="must"):
        parse_every(every)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields", [{}, {"steps": 1, "auto": True}, {"seconds": 0.0}, {"seconds": math.nan}, {"steps": 0}], ids=str
)
def test_a_policy_says_exactly_one_thing(fields: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        SaveWhen(**fields)  # type: ignore[arg-type]


def test_auto_saves_soon_at_first_then_as_often_as_pays() -> None:
    assert SaveWhen(auto=True).due(context(since=FIRST_SAVE_S))
    assert not SaveWhen(auto=True).due(context(since=FIRST_SAVE_S - 1))
    known = context(stall_s=0.1, persist_s=2.0)
    assert auto_interval(known) == pytest.approx(best_interval(0.1, PRIOR_MTBF_S) + 0.1)
    assert SaveWhen(auto=True).due(context(since=auto_interval(known), stall_s=0.1, persist_s=2.0))
    assert not SaveWhen(auto=True).due(context(since=auto_interval(known) - 1, stall_s=0.1, persist_s=2.0))


def test_what_the_run_has_measured_and_what_was_set_both_count() -> None:
    slow = context(stall_s=0.1, persist_s=200.0)
    assert auto_interval(slow) == 250
    assert auto_interval(context(stall_s=20.0, persist_s=20.0, overhead_budget=0.01)) > 2000
    assert auto_interval(context(stall_s=0.1, persist_s=2.0, worst_persist_s=5.0, late_s=1.0, rpo_s=20.0)) == 14
    assert auto_interval(context(rpo_s=1.0)) == FIRST_SAVE_S, "the cost has to get known first"


def test_an_objective_needs_a_policy_that_may_follow_it() -> None:
    assert parse_every("auto", rpo_s=60) == SaveWhen(auto=True)
    both = SaveWhen(steps=1000) | SaveWhen(auto=True)
    assert parse_every(both, rpo_s=60) == both
    for every in (10, "90s", SaveWhen(seconds=5) | SaveWhen(steps=3)):
        with pytest.raises(UsageError, match="rpo=60 s with every=") as caught:
            parse_every(every, rpo_s=60)
        assert 'every="auto"' in str(caught.value.hint)


def test_failures_that_happen_shorten_the_estimate() -> None:
    assert mean_time_between_failures(0, 0) == PRIOR_MTBF_S
    day = 24 * 3600
    assert mean_time_between_failures(day, 24) < 2 * 3600 < mean_time_between_failures(day, 2)
