"""The simulation in arrays does what one event after another gives."""

from __future__ import annotations

import random

import pytest

from resilient.policy.planning.monte_carlo import Tiers, simulate

SINGLE = Tiers(mtbf_s=1000, interval_s=100, stall_s=10, near_recovery_s=60)
TWO = Tiers(
    mtbf_s=1800,
    interval_s=60,
    stall_s=1,
    near_recovery_s=60,
    near_lag_s=5,
    survives=0.7,
    every=5,
    store_recovery_s=180,
    store_lag_s=120,
    detection_s=30,
)
SLOW_UPLOAD = Tiers(
    mtbf_s=600,
    interval_s=50,
    stall_s=2,
    near_recovery_s=20,
    survives=0.5,
    every=3,
    store_recovery_s=300,
    store_lag_s=400,
)


def step_by_step(tiers: Tiers, failures: int, seed: int) -> float:
    """Live through failures one after another, on a time axis: an own reading of what `Tiers` says."""
    draw = random.Random(seed)
    wall_s, near, store = 0.0, 0, 0
    near_there = True
    for _ in range(failures):
        near_there = near_there and draw.random() < tiers.survives
        position = near if near_there else store
        left_s = draw.expovariate(1 / tiers.mtbf_s)
        wall_s += tiers.detection_s + left_s
        left_s -= tiers.near_recovery_s if near_there else tiers.store_recovery_s
        if left_s < 0:
            continue
        if near_there and left_s >= tiers.store_lag_s:
            store = max(store, position)
        now_s = 0.0
        while now_s < left_s:
            now_s += tiers.interval_s  # where the save begins
            position += 1
            if now_s + max(tiers.stall_s, tiers.near_lag_s or 0.0) <= left_s:
                near, near_there = position, True
            durable_s = now_s + max(tiers.stall_s, tiers.near_lag_s or 0.0, tiers.store_lag_s)
            if position % tiers.every == 0 and durable_s <= left_s:
                store = max(store, position)
            now_s += tiers.stall_s
    return (near if near_there else store) * tiers.interval_s / wall_s


@pytest.mark.parametrize("tiers", [SINGLE, TWO, SLOW_UPLOAD], ids=["one tier", "two tiers", "slow upload"])
def test_arrays_and_single_events_agree(tiers: Tiers) -> None:
    seed = 11
    print("seed", seed)
    found = simulate(tiers, histories=1000, seed=seed)
    assert found.failures == 200_000
    assert 0 < found.half_width < 0.004
    assert step_by_step(tiers, 30_000, seed) == pytest.approx(found.mean, abs=0.006)


def test_the_interval_of_confidence_holds_what_it_says() -> None:
    truth = simulate(TWO, histories=5000, seed=1).mean
    inside = 0
    for seed in range(60):
        found = simulate(TWO, histories=100, seed=100 + seed)
        inside += abs(found.mean - truth) <= found.half_width
    assert inside >= 50, "95 % of 60 are meant"


def test_the_same_seed_gives_the_same_and_a_near_tier_that_is_always_lost_is_none() -> None:
    assert simulate(TWO, histories=50, seed=3) == simulate(TWO, histories=50, seed=3)
    lost = Tiers(
        mtbf_s=1800, interval_s=60, stall_s=1, near_recovery_s=1, survives=0.0, store_recovery_s=180, store_lag_s=30
    )
    alone = Tiers(mtbf_s=1800, interval_s=60, stall_s=1, near_recovery_s=180, near_lag_s=30)
    assert simulate(lost, seed=2).mean == pytest.approx(simulate(alone, seed=2).mean, abs=0.001)
