"""What each rank does in the resharding proof: build its part of a random tree, save it, or load it and compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import resilient
from resilient.state.tensors import flat
from tests.ranks import cpu_mesh

Layout: TypeAlias = tuple[int | None, ...]
"""For each mesh dimension: the tensor dimension that it shards, or None for a replica."""


Mesh: TypeAlias = tuple[int, ...]
"""The shape of a device mesh."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor of the tree: ``plain`` ones are no DTensors, others lie so on the mesh that saves or loads."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    seed: int
    transposed: bool
    plain: bool
    saved: Layout
    loaded: Layout


def full_tensor(spec: Spec) -> torch.Tensor:
    """Return the same random bits on every rank; not contiguous where the spec says so."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    shape = spec.shape[::-1] if spec.transposed else spec.shape
    generator = torch.Generator().manual_seed(spec.seed)
    if dtype == torch.bool:
        made = torch.randint(0, 2, shape, generator=generator).bool()
    else:
        count = torch.Size(shape).numel() * dtype.itemsize
        made = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)
    return made.permute(tuple(reversed(range(made.ndim)))) if spec.transposed else made


def tree(specs: list[Spec], mesh_shape: tuple[int, ...], *, loading: bool) -> dict[str, torch.Tensor]:
    mesh = cpu_mesh(mesh_shape)
    made = {}
    for spec in specs:
        full = full_tensor(spec)
        layout = spec.loaded if loading else spec.saved
        placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in layout]
        made[spec.name] = full if spec.plain else distribute_tensor(full, mesh, placements, src_data_rank=None)
    return made


def bits(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return flat(local.detach()).view(torch.uint8)


def save(url: str, specs: list[Spec], mesh_shape: tuple[int, ...]) -> None:
    resilient.save(url, 1, {"tree": {"nested": tree(specs, mesh_shape, loading=False)}}).wait(60)


def load(url: str, specs: list[Spec], mesh_shape: tuple[int, ...]) -> list[str]:
    """Return the names of the tensors whose local bits differ from those of the full tensor in this layout."""
    wanted = tree(specs, mesh_shape, loading=True)
    into = tree(specs, mesh_shape, loading=True)
    for tensor in into.values():
        bits_of = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        bits_of.copy_(torch.zeros_like(bits_of))
    resilient.load(url, {"tree": {"nested": into}})
    return [name for name in wanted if not torch.equal(bits(wanted[name]), bits(into[name]))]
