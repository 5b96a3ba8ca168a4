"""What is concluded from how the lives of a run ended, case by case."""

from __future__ import annotations

import pytest

from resilient.policy.demotion import CODE, ENVIRONMENT, NUMERIC, SOON_STEPS, Demote, Failure, Life, Verdict, judge


def life(
    start: int | None,
    step: int | None,
    *,
    error: str = "FloatingPointError",
    cause: str = NUMERIC,
    program: str = "p",
    progressed: bool = False,
) -> Life[int]:
    """Return a life that started from a step (None: fresh) and failed at one (None: it did not)."""
    if step is None:
        return Life(start=start, failure=None, progressed=progressed)
    failure = Failure(
        error=error, message="loss is nan", program=program, cause=cause, step=step, since=step - (start or 0)
    )
    return Life(start=start, failure=failure, progressed=progressed)


def decide(
    *lives: Life[int],
    candidates: tuple[int, ...] = (30, 20, 10),
    demoted: tuple[int, ...] = (),
    max_demotions: int = 3,
    max_failed_attempts: int = 3,
) -> object:
    decision = judge(lives, candidates, demoted, max_demotions=max_demotions, max_failed_attempts=max_failed_attempts)
    match decision:
        case Demote():
            return "demote", decision.start
        case Verdict():
            return "verdict", decision.starts, decision.reinstate, decision.spent
        case None:
            return None


def test_two_failures_alike_soon_after_the_same_restore_demote_it() -> None:
    assert decide(life(30, 33), life(30, 33)) == ("demote", 30)
    assert decide(life(30, 33), life(30, 33), life(None, 33)) == ("demote", 30), "the life that saved it failed so too"
    assert decide(life(30, 35), life(30, 33)) == ("demote", 30), "the step need not be the same"
    assert decide(life(30, 33, cause=CODE), life(30, 33, cause=CODE)) == ("demote", 30)


@pytest.mark.parametrize(
    "lives",
    [
        (),
        (life(30, 33),),
        (life(30, None), life(30, 33), life(30, 33)),  # the last one was killed, or ended well
        (life(30, 33), life(30, None), life(30, 33)),
        (life(30, 33), life(30, 33, error="KeyError")),
        (life(30, 33), life(30, 33, program="changed")),
        (life(30, 33), life(20, 23)),
        (life(None, 3), life(None, 3)),
        (life(30, 30 + SOON_STEPS + 1), life(30, 33)),
        (life(30, 33, cause=ENVIRONMENT), life(30, 33, cause=ENVIRONMENT)),
        (life(30, 33, progressed=True), life(30, 33)),
    ],
)
def test_anything_less_is_no_evidence(lives: tuple[Life[int], ...]) -> None:
    assert decide(*lives) is None


def test_the_same_failure_from_an_older_one_at_the_same_step_takes_the_demotion_back() -> None:
    assert decide(life(20, 33), life(30, 33), life(30, 33), candidates=(20, 10), demoted=(30,)) == (
        "verdict",
        (20, 30),
        (30,),
        0,
    )
    # At another step it is another matter: perhaps the older one is bad as well.
    assert decide(life(20, 23), life(30, 33), life(30, 33), candidates=(20, 10), demoted=(30,)) is None
    again = decide(life(20, 23), life(20, 23), life(30, 33), life(30, 33), candidates=(20, 10), demoted=(30,))
    assert again == ("demote", 20)


def test_there_are_never_more_demotions_than_the_budget_without_progress_between() -> None:
    lives = [life(start, start + 3) for start in (20, 20, 30, 30)]
    assert decide(*lives, candidates=(20, 10), demoted=(30,), max_demotions=1) == ("verdict", (20,), (), 1)
    assert decide(*lives, candidates=(20, 10), demoted=(30,), max_demotions=2) == ("demote", 20)
    lives[2:2] = [life(20, None)]  # a life that was killed is no progress
    assert decide(*lives, candidates=(20, 10), demoted=(30,), max_demotions=1) == ("verdict", (20,), (), 1)
    lives[2:2] = [life(30, None, progressed=True)]
    assert decide(*lives, candidates=(20, 10), demoted=(30,), max_demotions=1) == ("demote", 20)


def test_without_anything_older_or_a_budget_a_bounded_number_of_failures_is_the_verdict() -> None:
    twice = [life(30, 33)] * 2
    for how in ({"candidates": (30,)}, {"max_demotions": 0}):
        assert decide(*twice, **how) is None
        assert decide(life(30, 33), *twice, **how) == ("verdict", (30,), (), 0)


def test_the_same_failure_at_the_same_step_is_a_verdict_whatever_caused_it_and_whatever_was_saved() -> None:
    missing = [life(start, 33, cause=ENVIRONMENT, progressed=True) for start in (30, 20, 10)]
    assert decide(*missing) == ("verdict", (30, 20, 10), (), 0)
    assert decide(*missing, max_failed_attempts=4) is None
    fresh = [life(None, 0, cause=CODE)] * 3
    assert decide(*fresh, candidates=()) == ("verdict", (None,), (), 0)
