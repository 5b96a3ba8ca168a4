"""Axes of time: round moments, few of them, all inside."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.report.axis import Axis, nice


@settings(deadline=None)
@given(st.floats(0, 4e9, allow_subnormal=False), st.floats(0.5, 4e8))
def test_marks_are_few_inside_and_in_order(began_s: float, span_s: float) -> None:
    axis = Axis(began_s=began_s, ended_s=began_s + span_s)
    ticks = axis.ticks()
    places = [at for at, _ in ticks]
    assert len(ticks) <= 8
    assert places == sorted(places)
    assert all(began_s <= at <= axis.ended_s for at in places)


def test_labels_say_no_more_than_needed() -> None:
    assert [label for _, label in Axis(began_s=0, ended_s=3 * 3600).ticks()][:3] == ["00:00", "00:30", "01:00"]
    assert [label for _, label in Axis(began_s=0, ended_s=30).ticks()][:3] == ["00:00:00", "00:00:05", "00:00:10"]
    assert [label for _, label in Axis(began_s=0, ended_s=86_400 * 6).ticks()][:2] == ["Jan 1", "Jan 2"]
    assert [label for _, label in Axis(began_s=0, ended_s=86_400).ticks()][-1] == "Jan 2"


@settings(deadline=None)
@given(st.floats(1e-9, 1e15))
def test_scales_end_at_a_round_number_not_far_above(peak: float) -> None:
    assert peak * 0.999 <= nice(peak) <= 2.001 * peak
