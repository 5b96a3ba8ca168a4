from __future__ import annotations

import math
import random

import pytest

from resilient.policy.planning.spares import failure_probability, spare_nodes


def test_as_many_spares_as_byterobust_keeps() -> None:
    assert [spare_nodes(nodes, probability=0.0012) for nodes in (128, 256, 512, 1024)] == [2, 2, 3, 4]


@pytest.mark.parametrize(("nodes", "probability"), [(1, 0.5), (40, 0.3), (12_500, 0.00234), (2_000_000, 0.001)])
def test_so_many_are_enough_on_99_of_100_days_and_one_less_is_not(nodes: int, probability: float) -> None:
    spares = spare_nodes(nodes, probability=probability)

    def enough(number: int) -> float:
        logs = (
            math.lgamma(nodes + 1)
            - math.lgamma(k + 1)
            - math.lgamma(nodes - k + 1)
            + k * math.log(probability)
            + (nodes - k) * math.log1p(-probability)
            for k in range(number + 1)
        )
        return math.fsum(map(math.exp, logs))

    assert enough(spares) >= 0.99 - 1e-9
    assert spares == 0 or enough(spares - 1) < 0.99


def test_the_chance_of_a_failure_is_that_of_a_constant_rate() -> None:
    assert failure_probability(1.2) == pytest.approx(0.0012, rel=1e-3)
    draw = random.Random(5)
    days = [draw.expovariate(200 / 1000) for _ in range(20_000)]
    assert failure_probability(200, window_days=3) == pytest.approx(sum(d < 3 for d in days) / len(days), abs=0.01)
    assert spare_nodes(7, probability=1.0) == 7
