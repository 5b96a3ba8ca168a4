from __future__ import annotations

import random

import pytest

from resilient.policy.planning.measured import Measured


def measured(*durations_s: float) -> Measured:
    found = Measured()
    for each in durations_s:
        found.add(each)
    return found


def test_nothing_is_known_before_the_first() -> None:
    assert (Measured().usual_s, Measured().worst_s) == (None, None)
    nothing = Measured()
    nothing.add_to_last(3)
    assert nothing.usual_s is None
    assert (measured(2.0).usual_s, measured(2.0).worst_s) == (2.0, 2.0)


def test_a_change_is_known_in_full_after_eight() -> None:
    found = measured(*[1.0] * 50, *[2.0] * 4)
    assert found.usual_s == pytest.approx(1.5)
    found = measured(*[1.0] * 50, *[2.0] * 8)
    assert (found.usual_s, found.worst_s) == (2.0, 2.0)
    assert measured(*[2.0] * 50, *[1.0] * 8).usual_s == 1.0


@pytest.mark.parametrize("place", range(8))
def test_one_out_of_line_counts_nothing_and_every_other_one_does(place: int) -> None:
    values = [1.0] * 8
    values[place] = 1000.0
    assert (measured(*values).usual_s, measured(*values).worst_s) == (1.0, 1.0)
    assert measured(*[1.0, 3.0] * 8).usual_s == pytest.approx(2.0), "a budget is about sums"


def test_what_comes_later_belongs_to_the_last() -> None:
    found = measured(1.0, 1.0)
    found.add_to_last(4.0)
    assert (found.usual_s, found.worst_s) == (1.0, 5.0)
    draw = random.Random(1)
    many = [draw.random() for _ in range(100)]
    assert measured(*many).usual_s == pytest.approx(sum(sorted(many[-8:])[1:-1]) / 6)
