"""A large job waits for its commit without a storm of requests; a small one learns of it at once."""

from __future__ import annotations

import itertools

import pytest

from resilient.policy.committing import poll_s, takeover_s


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
