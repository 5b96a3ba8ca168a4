from __future__ import annotations

import pytest

from resilient.policy.replicas import Difference, differences


@pytest.mark.parametrize(
    ("values", "minority"),
    [("aaab", (3,)), ("baaa", (0,)), ("abaca", (1, 3)), ("aabb", ()), ("ab", ()), ("abc", ())],
)
def test_who_is_not_like_a_strict_majority_is_named(values: str, minority: tuple[int, ...]) -> None:
    reports = {rank: {"all": value.encode()} for rank, value in enumerate(values)}
    assert differences(reports) == [Difference(holders=tuple(range(len(values))), minority=minority)]


def test_groups_are_compared_each_by_itself() -> None:
    reports = {0: {"x": b"1"}, 1: {"y": b"2"}, 2: {"x": b"1"}, 3: {"y": b"3"}, 4: {"y": b"2"}}
    assert differences(reports) == [Difference(holders=(1, 3, 4), minority=(3,))]
