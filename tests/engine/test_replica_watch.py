"""Replicas of parameters that differ by one bit are noticed on real ranks, and the one in the minority is named."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import resilient
from resilient.clock import SYSTEM_CLOCK
from resilient.config import Settings
from resilient.engine.peers import Peers
from resilient.engine.replica_watch import ReplicaWatch, word_sum
from resilient.events import Bus, Event, ReplicaDiffers
from resilient.run.replicas import compared
from resilient.state.capture import capture
from tests.figures import Figures
from tests.ranks import Ranks

EVERY = 10


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 17), nn.BatchNorm1d(17), nn.Linear(17, 5).to(torch.bfloat16))


def flip(module: nn.Module, seed: int) -> None:
    rng = random.Random(seed)
    parameter = rng.choice(list(module.parameters())).data
    raw = parameter.view(-1).view(torch.uint8)
    raw[rng.randrange(raw.numel())] ^= 1 << rng.randrange(8)


def watched(seed: int, sick: int | None, at: int, size: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Go through some boundaries, with a flipped bit on one rank; return what rank 0 was told: when, of whom, who."""
    module = model()
    module.get_buffer("1.running_mean").add_(dist.get_rank())  # as it is between two forwards
    told: list[Event] = []
    bus = Bus()
    bus.subscribe(told.append)
    peers = Peers.current()
    watch = ReplicaWatch(
        {"model": module}, peers, every=EVERY, topic=f"test/{seed}/{size}", bus=bus, clock=SYSTEM_CLOCK
    )
    for step in range(1, 3 * EVERY + 1):
        if dist.get_rank() == sick and step == at:
            flip(module, seed)
        watch.at_boundary(step)
        time.sleep(0.02)
    watch.close()
    end = time.monotonic() + 60
    while watch.running and time.monotonic() < end:
        time.sleep(0.01)
    assert watch.error is None
    dist.barrier()
    return [(each.step, each.holders, each.ranks) for each in told if isinstance(each, ReplicaDiffers)]


@pytest.mark.proof
def test_a_flipped_bit_in_one_of_four_replicas_is_named_within_the_steps(
    ranks: Ranks, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    kept = figures("replica-digests", "one bit of a parameter is flipped in one of four replicas")
    for seed in range(len(kept), count(6, 50)):
        rng = random.Random(seed)
        sick, at = rng.randrange(4), rng.randrange(1, 2 * EVERY)
        (first, *_), *others = ranks(4).run(watched, seed, sick, at, 4, timeout_s=120)
        step, holders, named = first
        assert (holders, named) == ((0, 1, 2, 3), (sick,)), f"seed {seed}"
        assert at <= step < at + EVERY, f"seed {seed}"
        assert others == [[], [], []], "rank 0 tells it"
        kept.add(seed=seed, sick_rank=sick, named_rank=named[0], flipped_at=at, named_at=step)


def test_of_two_replicas_nobody_is_named_and_healthy_ones_are_left_alone(ranks: Ranks) -> None:
    assert ranks(2).run(watched, 1, 1, 3, 2, timeout_s=120)[0] == [(5, (0, 1), ())]
    assert ranks(3).run(watched, 2, None, 0, 3, timeout_s=120) == [[], [], []]


def compared_by(settings: dict[str, object], own: bool) -> int:
    module = model()
    item: object = resilient.PerRank(module) if own else module
    opened = SimpleNamespace(claim=SimpleNamespace(generation=1, nonce="n"), peers=Peers.current())
    watch: Any = compared({"model": item}, opened, Settings(**settings), bus=Bus(), clock=SYSTEM_CLOCK)  # type: ignore[arg-type]
    for step in range(1, 101):
        watch.at_boundary(step)
    watch.close()
    return len(watch._sums()) if watch._thread.ident is not None else -1


def test_what_is_each_ranks_own_is_not_compared_and_zero_compares_nothing(ranks: Ranks) -> None:
    assert ranks(2).run(compared_by, {}, False) == [1, 1]
    assert ranks(2).run(compared_by, {}, True) == [0, 0]
    assert ranks(2).run(compared_by, {"compare_replicas": 0}, False) == [-1, -1]


def nothing_to_compare() -> int:
    module = model()[0]
    fully_shard(module)
    from resilient.engine.replica_watch import sums_of

    found = sums_of(capture({"model": module}, rank=dist.get_rank(), world_size=2), {"model": module})
    return len(found)


def test_shards_have_no_replicas(ranks: Ranks) -> None:
    assert ranks(2).run(nothing_to_compare) == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_any_bit_of_any_tensor_counts(dtype: torch.dtype, offset: int) -> None:
    whole = torch.zeros(64, dtype=dtype)
    tensor = whole[offset:]
    raw = tensor.view(torch.uint8)
    before = int(word_sum(tensor))
    for byte in range(0, raw.numel(), 7):
        for bit in range(1 if dtype is torch.bool else 8):
            raw[byte] ^= 1 << bit
            assert int(word_sum(tensor)) != before, (byte, bit)
            raw[byte] ^= 1 << bit
    assert int(word_sum(torch.zeros(0, dtype=dtype))) == 0
    assert int(word_sum(torch.zeros((), dtype=dtype))) == 0
    word_sum(torch.zeros(3, 4, dtype=dtype).t())
