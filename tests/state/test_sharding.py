"""Which boxes a rank holds: against torch's own arithmetic, against real shards, and as a tiling of the whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from resilient.errors import UsageError
from resilient.format.box import Box
from resilient.state.capture import capture
from resilient.state.sharding import UnknownLayoutError, place, regions
from tests.ranks import Ranks, cpu_mesh


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=0, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    kinds: list[st.SearchStrategy[Placement]] = [st.just(Replicate())]
    if shape:
        kinds.append(st.integers(0, len(shape) - 1).map(Shard))
    return shape, mesh, tuple(draw(st.one_of(kinds)) for _ in mesh)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(layouts())
def test_the_boxes_of_all_coordinates_tile_the_tensor(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    shape, mesh, placements = layout
    times = torch.zeros(shape, dtype=torch.int64)
    for coordinate in itertools.product(*map(range, mesh)):
        ((box, local),) = regions(shape, mesh, coordinate, placements)
        size, offset = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
        assert box.size == tuple(size)
        assert box.volume == 0 or box.offset == tuple(offset)
        assert local == tuple(slice(0, extent) for extent in box.size)
        times[box.relative_to(Box.whole(shape))] += 1
    replicas = 1
    for extent, placement in zip(mesh, placements, strict=True):
        replicas *= extent if isinstance(placement, Replicate) else 1
    assert torch.equal(times, torch.full(shape, replicas))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 24), st.integers(1, 5), st.integers(1, 4))
def test_fsdp_over_tensor_parallel_is_cut_in_the_order_in_which_it_happened(rows: int, dp: int, tp: int) -> None:
    index = torch.arange(rows)
    empty = index[:0]
    for i, j in itertools.product(range(dp), range(tp)):
        column = [*torch.chunk(index, tp), *[empty] * tp][j]
        wanted = [*torch.chunk(column, dp), *[empty] * dp][i]
        placements = (_StridedShard(0, split_factor=tp), Shard(0))
        ((box, _),) = regions((rows,), (dp, tp), (i, j), placements)
        assert torch.equal(index[box.relative_to(Box.whole((rows,)))], wanted)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 24), st.integers(1, 4), st.integers(1, 4))
def test_a_strided_shard_alone_is_several_boxes(rows: int, count: int, factor: int) -> None:
    placement = _StridedShard(0, split_factor=factor)
    shards, _ = placement._split_tensor(torch.arange(rows), count, with_padding=False)
    for index, shard in enumerate(shards):
        found = regions((rows,), (count,), (index,), (placement,))
        held = [torch.arange(rows)[box.relative_to(Box.whole((rows,)))] for box, _ in found]
        assert torch.equal(torch.cat(held), shard)
        for box, local in found:
            assert torch.equal(shard[local], torch.arange(rows)[box.relative_to(Box.whole((rows,)))])


def test_a_pending_reduction_is_no_state() -> None:
    with pytest.raises(UnknownLayoutError, match="before a reduction"):
        regions((), (2,), (0,), (Partial(),))


# --- on real ranks


def _check(tensor: DTensor, full: torch.Tensor) -> tuple[Any, ...]:
    """Compare this rank's parts with the full tensor; return what the test compares between ranks."""
    placed = place(tensor)
    for box, local in placed.parts:
        assert torch.equal(local, full[box.relative_to(Box.whole(full.shape))])
    return tuple(box for box, _ in placed.parts), placed.holders


def distributed(shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]) -> tuple[Any, ...]:
    full = torch.arange(float(torch.Size(shape).numel())).reshape(tuple(shape))
    return _check(distribute_tensor(full, cpu_mesh(tuple(mesh_shape)), placements), full)


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
@pytest.mark.parametrize("shape", [(), (6,), (5, 3), (0, 4), (1, 7, 2)])
def test_parts_and_holders_are_those_of_real_ranks(ranks: Ranks, mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
    kinds: list[Placement] = [Replicate(), *[Shard(dim) for dim in range(len(shape))]]
    for placements in itertools.product(kinds, repeat=len(mesh)):
        found = ranks(4).run(distributed, shape, mesh, placements)
        for boxes, holders in found:
            same = tuple(rank for rank, (others, _) in enumerate(found) if others == boxes)
            assert holders is not None
            assert set(holders) <= set(same)
            assert all(box.volume == 0 for box in boxes) or holders == same


def fsdp_over_tp(rows: int, dp: int, tp: int, parallel: str) -> tuple[Any, ...]:
    mesh = cpu_mesh((dp, tp), ("dp", "tp"))
    full = torch.arange(rows * 6.0).reshape(rows, 6)
    linear = nn.Linear(6, rows, bias=False)
    with torch.no_grad():
        linear.weight.copy_(full)
    model = nn.Sequential(linear)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel() if parallel == "rows" else RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    weight = model[0].weight
    assert isinstance(weight, DTensor)
    found = _check(weight, full)
    assert torch.equal(weight.full_tensor(), full)
    return found


@pytest.mark.parametrize(("size", "dp", "tp"), [(4, 2, 2), (6, 3, 2)])
@pytest.mark.parametrize("rows", [8, 7, 5, 3, 1])
@pytest.mark.parametrize("parallel", ["rows", "columns"])
def test_fsdp_over_tensor_parallel_holds_what_is_said(
    ranks: Ranks, size: int, dp: int, tp: int, rows: int, parallel: str
) -> None:
    found = ranks(size).run(fsdp_over_tp, rows, dp, tp, parallel)
    times = torch.zeros(rows, 6, dtype=torch.int64)
    for boxes, _ in found:
        for box in boxes:
            times[box.relative_to(Box.whole((rows, 6)))] += 1
    assert torch.equal(times, torch.ones(rows, 6, dtype=torch.int64))


def outside_the_mesh() -> int:
    mesh = DeviceMesh("cpu", [0, 2])
    tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,))
    leaves = capture({"state": {"x": tensor}}, rank=dist.get_rank(), world_size=3).tensors
    assert all(leaf.holders == (dist.get_rank(),) for leaf in leaves)
    return len(leaves)


def test_a_rank_outside_the_mesh_holds_nothing(ranks: Ranks) -> None:
    assert ranks(3).run(outside_the_mesh) == [1, 0, 1]


def partial() -> str:
    mesh = cpu_mesh((dist.get_world_size(),))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(UsageError) as caught:
        capture({"state": {"deep": {"x": tensor}}}, rank=dist.get_rank(), world_size=2)
    return str(caught.value)


def test_a_partial_tensor_is_refused_by_name(ranks: Ranks) -> None:
    assert all("deep.x" in line and "reduction" in line for line in ranks(2).run(partial))
