"""A large job waits for its commit without a storm of requests; a small one learns of it at once."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from resilient.policy.committing import last_turn_s, poll_s, takeover_s


def requests_in(seconds: float, world_size: int) -> int:
    """Return how often all ranks ask in the first so many seconds."""
    total = 0
    for rank in range(world_size):
        waited_s, asked = 0.0, 0
        while (waited_s := waited_s + poll_s(asked, rank=rank, world_size=world_size)) < seconds:
            asked += 1
        total += asked
    return total


@pytest.mark.field_report("BR-207")
def test_32768_ranks_that_wait_a_minute_ask_a_thousand_times_a_second_at_most() -> None:
    assert requests_in(60.0, 32_768) <= 60 * 1000


def test_two_ranks_hear_of_a_commit_within_a_fraction_of_a_second() -> None:
    waits = [poll_s(asked, rank=1, world_size=2) for asked in range(50)]
    assert waits[0] <= 0.02
    assert max(waits) <= 0.75


def test_ranks_do_not_ask_in_step() -> None:
    waits = sorted(poll_s(9, rank=rank, world_size=100) for rank in range(100))
    assert all(later - sooner > 1e-4 for sooner, later in itertools.pairwise(waits))


def test_one_rank_at_a_time_takes_over_and_the_first_tries_at_once() -> None:
    assert takeover_s(rank=0, world_size=32_768) == 0.0
    assert takeover_s(rank=1, world_size=2) < 3.0
    assert takeover_s(rank=2, world_size=32_768) - takeover_s(rank=1, world_size=32_768) > 60.0


@pytest.mark.parametrize("world_size", [1, 8, 4096, 32_768])
def test_writers_that_leave_together_try_in_turns_of_1_2_4_and_so_on(world_size: int) -> None:
    turns = Counter(last_turn_s(rank=rank, world_size=world_size) for rank in range(world_size))
    assert min(turns) == 0.0
    assert all(turns[when] == 2**number for number, when in enumerate(sorted(turns)[:-1]))
    merge_s = takeover_s(rank=1, world_size=world_size)
    assert all(later - sooner >= merge_s * 0.999 for sooner, later in itertools.pairwise(sorted(turns)))
