"""Long series made short: no peak gets lost, and gaps stay gaps."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.report.bins import envelope, pieces, regular

values = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=60)


@settings(deadline=None)
@given(values, st.integers(1, 20), st.floats(0.01, 3))
def test_each_bin_has_the_least_the_largest_and_the_mean(series: list[float], bins: int, period_s: float) -> None:
    times = regular(5.0, period_s, len(series))
    ended = 5.0 + period_s * 50
    found = envelope([(times, series)], 5.0, ended, bins)
    for number in range(bins):
        there = [
            value
            for at, value in zip(times, series, strict=True)
            if at <= ended
            and not math.isnan(value)
            and min(int((at - 5.0) * (bins / (ended - 5.0))), bins - 1) == number
        ]
        if not there:
            assert np.isnan([found.low[number], found.high[number], found.mean[number]]).all()
            continue
        assert (found.low[number], found.high[number]) == (min(there), max(there))
        assert math.isclose(found.mean[number], sum(there) / len(there), rel_tol=1e-9, abs_tol=1e-6)
    assert found.peak == max((value for value in found.high if not math.isnan(value)), default=0.0)


def test_stretches_with_values() -> None:
    nan = math.nan
    assert pieces(np.array([nan, 1, 2, nan, 3])) == [(1, 3), (4, 5)]
    assert pieces(np.array([nan])) == []
