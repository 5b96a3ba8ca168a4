"""Any world size, any layout: saved on N ranks, restored on M, equal to the full tensor bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from resilient.format.box import Box
from resilient.format.dtypes import ITEMSIZE
from resilient.state.capture import capture
from resilient.state.prepare import prepare
from resilient.state.sharding import regions
from resilient.state.tensors import dtype_of
from tests.ranks import Ranks, cpu_mesh
from tests.state.tiny_engine import Share, bits, merge, share

REPLICATED = -1


class Spec(NamedTuple):
    """A tensor and its placements: for each mesh dimension a dimension or `REPLICATED`; None for a plain tensor."""

    dtype: str
    shape: tuple[int, ...]
    placements: tuple[int, ...] | None


def full(index: int, spec: Spec) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    limit = 2 if spec.dtype == "bool" else 256
    raw = torch.randint(
        0, limit, (math.prod(spec.shape) * ITEMSIZE[spec.dtype],), dtype=torch.uint8, generator=generator
    )
    return raw.view(dtype_of(spec.dtype)).reshape(spec.shape)


def local_box(spec: Spec, mesh: DeviceMesh) -> Box:
    if spec.placements is None:
        return Box.whole(spec.shape)
    placements = [Replicate() if dim == REPLICATED else Shard(dim) for dim in spec.placements]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    ((box, _),) = regions(spec.shape, mesh.shape, coordinate, placements)
    return box


def made(spec: Spec, content: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return this rank's part of a tensor, as a tensor that is not contiguous."""
    part = content[local_box(spec, mesh).relative_to(Box.whole(spec.shape))]
    local = torch.empty((*part.shape, 2), dtype=part.dtype)[..., 0].copy_(part)
    if spec.placements is None:
        return local
    placements = [Replicate() if dim == REPLICATED else Shard(dim) for dim in spec.placements]
    stride = torch.empty(spec.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(spec.shape), stride=stride)


def tree_of(specs: Sequence[Spec], mesh: DeviceMesh, *, other: int = 0) -> dict[str, Any]:
    return {"list": [made(s, full(i + other, s), mesh) for i, s in enumerate(specs)], "n": [len(specs)]}


def save_tree(specs: Sequence[Spec], mesh_shape: tuple[int, ...]) -> Share:
    mesh = cpu_mesh(mesh_shape)
    items = {"tree": tree_of(specs, mesh)}
    return share(capture(items, rank=dist.get_rank(), world_size=dist.get_world_size()))


def load_tree(shares: Sequence[Share], specs: Sequence[Spec], mesh_shape: tuple[int, ...]) -> None:
    saved = merge(shares)
    mesh = cpu_mesh(mesh_shape)
    tree = tree_of(specs, mesh, other=1000)
    saved.fill(
        prepare({"tree": tree}, saved.manifest, rank=dist.get_rank(), world_size=dist.get_world_size(), notices=[])
    )
    for index, (spec, tensor) in enumerate(zip(specs, tree["list"], strict=True)):
        wanted = full(index, spec)[local_box(spec, mesh).relative_to(Box.whole(spec.shape))]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert bits(local) == bits(wanted), spec


def meshes(size: int) -> list[tuple[int, ...]]:
    return [
        (size,),
        *[(a, size // a) for a in range(2, size) if size % a == 0],
        *([(2, 1), (1, 2)] if size == 2 else []),
    ]


@st.composite
def reshardings(draw: st.DrawFn, sizes: list[int]) -> tuple[tuple[int, ...], tuple[int, ...], list[Spec], list[Spec]]:
    before, after = (draw(st.sampled_from(meshes(draw(st.sampled_from(sizes))))) for _ in range(2))
    saved: list[Spec] = []
    loaded: list[Spec] = []
    for _ in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(sorted(ITEMSIZE)))
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        for mesh, specs in ((before, saved), (after, loaded)):
            dims = st.integers(REPLICATED, len(shape) - 1)
            placements = draw(st.one_of(st.none(), st.tuples(*[dims for _ in mesh])))
            specs.append(Spec(dtype, shape, placements))
    return before, after, saved, loaded


@pytest.mark.proof
@pytest.mark.parametrize("chunk", range(5))
@pytest.mark.field_report("BR-061", "BR-076", "BR-082")
def test_random_trees_on_random_meshes_are_equal_to_the_full_tensor(
    ranks: Ranks, count: Callable[[int, int], int], chunk: int
) -> None:
    sizes = list(range(1, count(4, 6) + 1))

    @seed(chunk)
    @settings(
        max_examples=count(12, 100),
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(reshardings(sizes))
    def check(example: tuple[tuple[int, ...], tuple[int, ...], list[Spec], list[Spec]]) -> None:
        before, after, saved, loaded = example
        shares = ranks(math.prod(before)).run(save_tree, saved, before)
        ranks(math.prod(after)).run(load_tree, shares, loaded, after)

    check()


@pytest.mark.parametrize("elements", [0, 1, 3, 5, 6])
@pytest.mark.field_report("BR-061", "BR-080")
def test_sizes_that_the_ranks_do_not_divide(ranks: Ranks, elements: int) -> None:
    spec = [Spec("float32", (elements,), (0,))]
    for before in (4, 2):
        shares = ranks(before).run(save_tree, spec, (before,))
        for after in (4, 3, 1):
            ranks(after).run(load_tree, shares, spec, (after,))


# --- modules and optimizers


def plain_model(number: int) -> nn.Sequential:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(7, 6), nn.Linear(6, 3), nn.LayerNorm(3), nn.Linear(3, 3, bias=False)).double()


def ddp(number: int) -> nn.Module:
    return DistributedDataParallel(plain_model(number))


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp(number: int) -> nn.Module:
    return sharded(plain_model(number), cpu_mesh((dist.get_world_size(),)))


def fsdp_that_stays_gathered(number: int) -> nn.Module:
    model = fsdp(number)
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(reshard_after_backward=False)
    return model


def hsdp(number: int) -> nn.Module:
    return sharded(plain_model(number), cpu_mesh((2, dist.get_world_size() // 2), ("r", "s")))


def parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    styles = {"0": ColwiseParallel(), "1": RowwiseParallel(), "3": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, mesh, styles)


def tp(number: int) -> nn.Module:
    return parallel(plain_model(number), cpu_mesh((dist.get_world_size(),)))


def fsdp_over_tp(number: int) -> nn.Module:
    mesh = cpu_mesh((2, 2), ("dp", "tp"))
    return sharded(parallel(plain_model(number), mesh["tp"]), mesh["dp"])


LAYOUTS = {
    "plain": (1, plain_model),
    "ddp": (2, ddp),
    "fsdp": (3, fsdp),
    "gathered": (4, fsdp_that_stays_gathered),
    "hsdp": (4, hsdp),
    "tp": (2, tp),
    "fsdp over tp": (4, fsdp_over_tp),
}


def step(model: nn.Module, optimizer: Optimizer) -> torch.Tensor:
    data = torch.arange(14.0).reshape(2, 7).double()
    loss: torch.Tensor = model(data).square().sum()
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trained(layout: str, number: int, steps: int) -> tuple[nn.Module, Optimizer]:
    model: nn.Module = LAYOUTS[layout][1](number)
    optimizer = AdamW(model.parameters(), lr=0.1, foreach=False)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def whole(model: nn.Module, optimizer: Optimizer) -> dict[str, bytes]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    found: dict[str, bytes] = {}
    for name, parameter in model.named_parameters():
        for key, value in {"": parameter, **optimizer.state[parameter]}.items():
            assert isinstance(value, torch.Tensor)
            gathered = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{name.removeprefix('module.')}:{key}"] = bits(gathered)
            if value.shape and isinstance(parameter, DTensor):
                assert isinstance(value, DTensor)
                assert value.placements == parameter.placements
    return found


def save_model(layout: str) -> tuple[Share, dict[str, bytes]]:
    model, optimizer = trained(layout, 0, 2)
    items = {"model": model, "optimizer": optimizer}
    return share(capture(items, rank=dist.get_rank(), world_size=dist.get_world_size())), whole(model, optimizer)


def load_model(layout: str, steps: int, shares: Sequence[Share]) -> tuple[dict[str, bytes], float]:
    saved = merge(shares)
    model, optimizer = trained(layout, 1, steps)
    items = {"model": model, "optimizer": optimizer}
    notices: list[str] = []
    saved.fill(prepare(items, saved.manifest, rank=dist.get_rank(), world_size=dist.get_world_size(), notices=notices))
    assert not notices
    found = whole(model, optimizer)
    return found, step(model, optimizer).item()


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.field_report("BR-062")
def test_saved_in_any_layout_restored_in_any_other(ranks: Ranks, before: str) -> None:
    answers = ranks(LAYOUTS[before][0]).run(save_model, before)
    shares, wanted = [answer[0] for answer in answers], answers[0][1]
    holders = {part.holders for one in shares for part in one.parts if part.tensor.name == "0.weight"}
    assert (
        holders
        == {
            "plain": {(0,)},
            "ddp": {None},
            "fsdp": {(0,), (1,), (2,)},
            "gathered": {(0,), (1,), (2,), (3,)},
            "hsdp": {(0, 2), (1, 3)},
            "tp": {(0,), (1,)},
            "fsdp over tp": {(0,), (1,), (2,), (3,)},
        }[before]
    )
    losses = []
    for after, (size, _) in LAYOUTS.items():
        for steps in (0, 1):  # a fresh optimizer, and one whose state is filled in place
            for found, loss in ranks(size).run(load_model, after, steps, shares):
                assert found == wanted, f"{before} to {after}"
                losses.append(loss)
    assert max(losses) - min(losses) < 1e-9, "the restored weights are not the ones that are used"


def diverged_buffers() -> Share:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(2, momentum=1.0)))
    model(torch.full((2, 2), float(dist.get_rank())))
    kept = capture({"model": model}, rank=dist.get_rank(), world_size=dist.get_world_size())
    assert {leaf.name for leaf in kept.tensors if leaf.holders == (0,)} == (
        {"0.running_mean", "0.running_var", "0.num_batches_tracked"} if dist.get_rank() == 0 else set()
    )
    return share(kept)


def test_the_buffers_of_a_ddp_model_are_those_of_its_first_rank(ranks: Ranks) -> None:
    shares = ranks(2).run(diverged_buffers)
    assert merge(shares).whole["model", "0.running_mean", None].eq(0).all()
    assert {part.tensor.name for part in shares[1].parts} == {"0.weight", "0.bias"}
