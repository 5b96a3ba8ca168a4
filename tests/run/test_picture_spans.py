"""An exchange counts where nothing is computed: in recorded profiles, and in made ones whose answer is known."""

from __future__ import annotations

import random
import time
from statistics import median

import pytest
import torch
import torch.distributed as dist
from torch import nn

from resilient.run.picture_profile import Profile
from resilient.run.picture_spans import Event, Looked, _union, _without, look
from tests.ranks import Ranks, cpu_mesh

FUNCTION, USER = 0, 7
MS = 1_000_000


def op(name: str, begin: float, end: float, thread: int = 1) -> Event:
    return Event(name, "", False, FUNCTION, thread, int(begin * MS), int(end * MS))


def note(name: str, begin: float, end: float, thread: int = 2) -> Event:
    return Event(name, "", False, USER, thread, int(begin * MS), int(end * MS))


def kernel(name: str, begin: float, end: float, kind: str = "kernel", stream: int = 7) -> Event:
    return Event(name, kind, True, FUNCTION, stream, int(begin * MS), int(end * MS))


# A step under DDP with two buckets, as torch 2.13 recorded it on gloo, made shorter: the first bucket is exchanged
# while the backward pass goes on, the second one is waited for at its end.
DDP = [
    note("DistributedDataParallel.forward", 0.0, 19.0, thread=1),
    op("aten::linear", 0.1, 19.0),
    op("aten::addmm", 0.2, 18.9),
    op("autograd::engine::evaluate_function: AddmmBackward0", 20.0, 55.0),
    op("aten::mm", 20.1, 40.0),
    op("c10d::allreduce_", 40.0, 40.05),
    note("gloo:all_reduce", 40.1, 50.0),
    op("aten::mm", 40.1, 48.0),
    op("aten::mm", 48.02, 55.0),
    op("c10d::allreduce_", 56.30, 56.37),
    note("gloo:all_reduce", 56.5, 72.0, thread=3),
    op("torch.distributed.ddp.reducer::copy_bucket_to_grad", 72.1, 72.2),
    note("Optimizer.step#AdamW.step", 73.0, 80.0, thread=1),
    op("aten::lerp_", 73.1, 79.0),
]


def test_a_bucket_that_is_exchanged_while_the_backward_pass_goes_on_costs_nothing() -> None:
    assert look(DDP).exchange_s == pytest.approx(0.0155)


def test_an_operator_that_waits_in_what_it_calls_computes_nothing_meanwhile() -> None:
    # A tensor-parallel linear of DTensor: one operator, which dispatches, exchanges and waits within.
    events = [
        op("aten::linear", 0, 30),
        op("aten::mm", 0.1, 10),
        op("_c10d_functional::all_reduce", 10.0, 10.1),
        note("gloo:all_reduce", 10.1, 28),
        op("_c10d_functional::wait_tensor", 10.1, 28.1),
        op("aten::add", 28.2, 30),
    ]
    assert look(events).exchange_s == pytest.approx(0.018, abs=2e-4)


def test_the_way_from_one_operator_to_the_next_is_computing_and_a_longer_gap_is_waiting() -> None:
    busy = [op("aten::mul", place / 10, place / 10 + 0.05) for place in range(100)]  # 50 us, and 50 us between
    assert look([note("gloo:all_gather", 0, 10), *busy]).exchange_s == pytest.approx(0.0, abs=1e-4)
    assert look([note("gloo:all_gather", 0, 10), *busy[:50]]).exchange_s == pytest.approx(0.005, abs=1e-4)


def test_what_an_optimizer_exchanges_is_told_apart() -> None:
    events = [note("Optimizer.step#ZeRO.step", 10, 30, thread=1), note("gloo:broadcast", 25, 40)]
    assert look(events).exchange_s == pytest.approx(0.015)
    assert look(events).optimizer_s == pytest.approx(0.005)


def test_without_a_collective_nothing_is_exchanged() -> None:
    assert look([event for event in DDP if "gloo" not in event.name]) == Looked(exchange_s=0.0)
    assert look([]) == Looked(exchange_s=0.0)


# Names as in profiles of NCCL 2.19 and later (ncclDevKernel) and before (ncclKernel), and of RCCL. Not recorded here:
# there was no accelerator.
DEVICE = [
    op("aten::mm", 0, 500),  # what the processor does meanwhile does not count
    kernel("ampere_sgemm_128x64_tn", 0, 10),
    kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 5, 20, stream=20),
    kernel("Memcpy DtoD (Device -> Device)", 18, 19, kind="gpu_memcpy"),
    kernel("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", 30, 40, stream=20),
    kernel("nccl:all_reduce", 30, 40, kind="gpu_user_annotation"),
    kernel("Optimizer.step#AdamW.step", 45, 52, kind="gpu_user_annotation"),
    kernel("void at::native::multi_tensor_apply_kernel<...>", 45, 52),
]


def test_on_accelerators_kernels_of_collectives_count_that_no_other_work_overlaps() -> None:
    found = look(DEVICE)
    assert found.exchange_s == pytest.approx(0.009 + 0.010), "10 to 20 without the copy, 30 to 40"
    assert found.device_optimizer_s == pytest.approx(0.007)
    assert found.optimizer_s == 0.0


def test_spans_are_as_sets_of_moments() -> None:
    draw = random.Random(7)
    for _ in range(200):
        ones, others = (
            [(begin, begin + draw.randrange(1, 9)) for begin in (draw.randrange(60) for _ in range(draw.randrange(9)))]
            for _ in range(2)
        )
        left = _without(_union(ones), _union(others))
        expected = {m for b, e in ones for m in range(b, e)} - {m for b, e in others for m in range(b, e)}
        assert {moment for begin, end in left for moment in range(begin, end)} == expected
        assert sum(end - begin for begin, end in left) == len(expected)


def waited_under_fsdp() -> list[tuple[float, float]]:
    """Train a sharded model, with a rank that comes late; return what is shown of steps, and how long they waited."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    for layer in model:
        fully_shard(layer, mesh=cpu_mesh((dist.get_world_size(),)))
    fully_shard(model, mesh=cpu_mesh((dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    inner, waited_s, found = dist.Work.wait, 0.0, []

    def wait(self: dist.Work, *arguments: object) -> bool:
        nonlocal waited_s
        began_s = time.monotonic()
        done = inner(self, *arguments)  # type: ignore[arg-type]  # as it was called
        waited_s += time.monotonic() - began_s
        return done

    dist.Work.wait = wait  # type: ignore[method-assign, assignment]  # FSDP waits in Python, by this alone
    try:
        for _ in range(4):
            waited_s = 0.0
            profile = Profile.begin()
            assert profile is not None
            time.sleep(0.2 * dist.get_rank())
            loss = model(torch.ones(8, 64)).sum()
            time.sleep(0.3 * (1 - dist.get_rank()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            looked = profile.look()
            assert looked is not None
            found.append((looked.exchange_s, waited_s))
    finally:
        dist.Work.wait = inner  # type: ignore[method-assign]
    return found[1:]


def test_under_fsdp_what_is_shown_is_how_long_the_rank_waited(ranks: Ranks) -> None:
    for found, late_s in zip(ranks(2).run(waited_under_fsdp), (0.2, 0.3), strict=True):
        print(found)
        shown_s, waited_s = (median(each) for each in zip(*found, strict=True))
        assert waited_s > 0.8 * late_s
        assert shown_s == pytest.approx(waited_s, rel=0.25)


def exchanged() -> tuple[list[str], float]:
    """Profile collectives of each kind for real; return their names, and what was shown."""
    profile = Profile.begin()
    assert profile is not None
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    dist.all_gather_into_tensor(torch.empty(2000), tensor)
    dist.reduce_scatter_tensor(torch.empty(500), tensor)
    dist.barrier()
    events = profile.end()
    return sorted({event.name for event in events if event.name.startswith("gloo:")}), look(events).exchange_s


def test_torch_still_calls_its_collectives_by_these_names(ranks: Ranks) -> None:
    for names, exchange_s in ranks(2).run(exchanged):
        assert {"gloo:all_reduce", "gloo:broadcast", "gloo:all_gather", "gloo:barrier"} <= set(names)
        assert exchange_s > 0
