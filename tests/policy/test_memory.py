"""How many slots: two only if half of the memory stays free, none that does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.policy.memory import Limit, available, slots_that_fit

nbytes = st.integers(0, 1 << 50)


@given(nbytes, nbytes, st.sampled_from([None, 1, 2]))
def test_what_is_decided_fits(size: int, room: int, wanted: int | None) -> None:
    count = slots_that_fit(size, room, wanted=wanted)
    assert count * size <= room
    assert count <= (wanted or 2)
    assert count == 2 or wanted == 1 or 2 * size > room / 2 - 1


@pytest.mark.parametrize(
    ("room", "wanted", "count"),
    [
        (400, None, 2),
        (399, None, 1),
        (100, None, 1),
        (99, None, 0),
        (200, 2, 2),
        (199, 2, 1),
        (10_000, 1, 1),
        (99, 1, 0),
    ],
)
def test_slots_of_a_hundred_bytes(room: int, wanted: int | None, count: int) -> None:
    assert slots_that_fit(100, room, wanted=wanted) == count


def test_every_limit_counts_and_the_ranks_of_a_host_share() -> None:
    assert available(1000, [], local_ranks=1) == 1000
    limits = [Limit(nbytes=900, used=500, reclaimable=100), Limit(nbytes=5000, used=0)]
    assert available(1000, limits, local_ranks=1) == 500
    assert available(1000, limits, local_ranks=4) == 125
    assert available(1000, [Limit(nbytes=10, used=20)], local_ranks=1) == 0
