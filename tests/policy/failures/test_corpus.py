"""How often the rules are right, on what processes have really said: the confusion matrix, and the guarantees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from resilient.policy.failures.actions import Attempt, Budgets, decide
from resilient.policy.failures.classes import ABOUT, Action, FailureClass, Owner
from resilient.policy.failures.verdict import explain
from tests.figures import Figures
from tests.policy.failures.corpus_cases import SECONDARY, Case, cases

BEFORE, LATER, HELD_OUT = list(cases("texts")), list(cases("later")), list(cases("holdout"))
ALL = [*BEFORE, *LATER, *HELD_OUT]
UNSEEN = {"later": LATER, "held out": HELD_OUT}


def right(some: Sequence[Case]) -> int:
    return sum(case.found == case.expected for case in some)


def print_confusion(some: Sequence[Case]) -> None:
    counts = Counter((case.expected, case.found) for case in some)
    for expected in sorted({case.expected for case in some}):
        row = {found: count for (wanted, found), count in sorted(counts.items()) if wanted == expected}
        print(f"{expected:<18} " + ", ".join(f"{found} {count}" for found, count in row.items()))


@pytest.mark.proof
def test_the_class_of_nineteen_in_twenty_is_right(figures: Callable[[str, str], Figures]) -> None:
    at_first = {name: sum(case.at_first is None for case in some) for name, some in UNSEEN.items()}
    print(f"\n{right(ALL)} of {len(ALL)}; at first sight {at_first}")
    print_confusion(ALL)
    for case in ALL:
        if case.found != case.expected:
            print(f"{case} is {case.expected}, found {case.found}")
    assert len(ALL) >= 120
    assert 3 * sum(map(len, UNSEEN.values())) >= len(ALL)
    assert right(ALL) >= 0.95 * len(ALL)
    found = figures("classifier", "Classes of failures, from what processes say")
    if not len(found):
        found.add(cases=len(ALL), right=right(ALL))
        for name, some in UNSEEN.items():
            found.add(**{f"{name}, cases": len(some), f"{name}, right at first sight": at_first[name]})


def test_nothing_that_follows_is_taken_for_a_cause_and_no_cause_for_what_follows() -> None:
    confused = [str(case) for case in ALL if (case.found == SECONDARY) != (case.expected == SECONDARY)]
    assert not confused


def test_no_error_of_a_program_excludes_a_node_however_often_it_comes() -> None:
    for case in ALL:
        if case.expected != "user-error":
            continue
        verdict = explain([case.said], expected=1)
        for times in range(1, 6):
            history = [Attempt(verdict=verdict, progressed=False)] * times
            assert decide(history, Budgets(attempts=9)).action is not Action.EXCLUDE_NODE, case


def test_every_class_has_a_way_up_that_ends_and_users_errors_never_reach_a_node() -> None:
    assert set(ABOUT) == set(FailureClass)
    assert all(about.ladder for about in ABOUT.values())
    assert not any(Action.EXCLUDE_NODE in about.ladder for about in ABOUT.values() if about.owner is Owner.USER)
