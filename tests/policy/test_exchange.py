"""Replicas exchange what they read when the store is what they wait for, and not when the network is."""

from __future__ import annotations

import pytest

from resilient.policy.exchange import exchange_pays


@pytest.mark.parametrize(
    ("read_s", "pass_on_s", "pays"),
    [
        ([1.0] * 8, [0.5] * 8, True),  # alone each would read eight parts
        ([1.0] * 8, [8.0] * 8, False),
        ([0.1, 0.1], [0.5, 0.5], False),  # each has a fast store of its own
        ([1.0, 1.0], [0.9, 0.9], False),  # hardly better: what was measured once is only about right
        ([0.1, 1.0], [0.2, 0.2], True),  # the slowest rank counts
        ([1.0], [0.0], False),
    ],
)
def test_the_faster_way_is_chosen(read_s: list[float], pass_on_s: list[float], *, pays: bool) -> None:
    assert exchange_pays(read_s, pass_on_s) is pays
