"""Numbers, durations and times as people write them."""

from __future__ import annotations

import math

import pytest

from resilient.report.units import count, duration, join, moment, one_line, percent, printable, quantile


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (0.000_02, "under 0.1 ms"),
        (0.0012, "1.2 ms"),
        (0.002, "2 ms"),
        (0.35, "350 ms"),
        (0.9996, "1 s"),
        (1.44, "1.4 s"),
        (9.96, "10 s"),
        (59.6, "1 min"),
        (125, "2 min 5 s"),
        (3599.7, "1 h"),
        (3725, "1 h 2 min"),
        (90_000, "1 d 1 h"),
        (-3, "-3 s"),
        (math.nan, "not known"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_share_that_is_not_all_never_looks_like_it() -> None:
    assert [percent(share) for share in (0, 0.00001, 0.5, 0.99999, 1)] == [
        "0.0 %",
        "under 0.1 %",
        "50.0 %",
        "over 99.9 %",
        "100.0 %",
    ]


def test_words() -> None:
    assert count(1, "save") == "1 save"
    assert count(12_345, "save") == "12,345 saves"
    assert join(["a", "b", "c"]) == "a, b and c"
    assert moment(0) == "1970-01-01 00:00:00 UTC"
    assert printable("a\x1b[0m\r\nb\tc\u202e") == "a\\u001b[0m\nb    c\\u202e"
    assert one_line("a\n  b " * 100, most=9) == "a b a b …"


def test_quantiles_are_values_that_are_there() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.95) == 4.0
    assert math.isnan(quantile([], 0.5))
