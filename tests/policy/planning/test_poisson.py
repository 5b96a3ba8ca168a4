from __future__ import annotations

import numpy as np
import pytest

from resilient.policy.planning.poisson import interval


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(0, 0, 3.689), (1, 0.0253, 5.572), (3, 0.619, 8.767), (10, 4.795, 18.390), (100, 81.36, 121.63)],
)
def test_the_limits_are_the_tabulated_ones(count: int, low: float, high: float) -> None:
    assert interval(count) == pytest.approx((low, high), rel=1e-3, abs=1e-4)


def test_they_hold_the_truth_at_least_as_often_as_they_say() -> None:
    draw = np.random.default_rng(20261201)
    for mean in (0.7, 4.0, 30.0):
        counts = draw.poisson(mean, 2000).tolist()
        limits = {count: interval(count) for count in set(counts)}
        inside = sum(limits[count][0] <= mean <= limits[count][1] for count in counts)
        assert inside >= 0.94 * len(counts)
