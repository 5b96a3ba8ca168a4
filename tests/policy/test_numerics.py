from __future__ import annotations

import math
import random

import pytest

from resilient.policy.numerics import FEWEST, MAX_RERUNS, Outcome, Suspicion, Usual, judge


def usual(*values: float) -> Usual:
    found = Usual()
    for value in values:
        found.accept({"loss": value})
    return found


def test_a_value_of_five_times_what_is_usual_is_a_spike_once_something_is_usual() -> None:
    assert usual(*[2.0] * (FEWEST - 1)).suspect({"loss": 1e9})[0] is Suspicion.NONE
    known = usual(*[2.0] * FEWEST)
    assert known.suspect({"loss": 10.0})[0] is Suspicion.NONE
    assert known.suspect({"loss": 10.1}) == (Suspicion.SPIKE, "loss is 10.1, 5.0 times its median of 2")
    assert known.suspect({"loss": -10.1})[0] is Suspicion.SPIKE


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_always_suspicious_and_never_usual(value: float) -> None:
    known = usual(*[value] * 100)
    assert known.suspect({"norm": 1.0, "loss": value}) == (Suspicion.NON_FINITE, f"loss is {value}")
    assert known.suspect({"loss": 1e9})[0] is Suspicion.NONE, "nothing was learned from what was not finite"


def test_a_healthy_training_is_never_suspected() -> None:
    seed = 5
    rng = random.Random(seed)
    known, level = Usual(), 10.0
    for step in range(10_000):
        level = max(0.05, level * 0.999)
        value = {"loss": level * rng.lognormvariate(0, 0.25)}
        assert known.suspect(value)[0] is Suspicion.NONE, f"seed {seed}, step {step}"
        known.accept(value)


@pytest.mark.parametrize(
    ("worst", "tries", "changed", "expected"),
    [
        (Suspicion.NONE, 0, True, "healthy"),
        (Suspicion.NONE, 1, True, "transient"),
        (Suspicion.NON_FINITE, 0, True, "run again"),
        (Suspicion.NON_FINITE, 1, False, "reproducible"),
        (Suspicion.SPIKE, 1, True, "run again"),
        (Suspicion.SPIKE, MAX_RERUNS, True, "unstable"),
    ],
)
def test_what_a_rerun_shows(worst: Suspicion, tries: int, changed: bool, expected: Outcome) -> None:
    assert judge(worst, tries=tries, changed=changed) == expected
