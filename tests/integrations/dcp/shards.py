"""What each rank does in the round trips: build its part of known tensors, save, load in another layout, compare."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor import empty as empty_sharded
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardOf

from resilient.integrations.dcp import StorageReader, StorageWriter
from tests.ranks import cpu_mesh

warnings.simplefilter("ignore")

Cut: TypeAlias = tuple[tuple[int, int, int, int], ...]
"""Parts of a matrix: first row, first column, rows, columns; dealt out to the ranks in turn."""

SHAPE = (10, 20)
CUTS: dict[str, Cut] = {
    "rows": ((0, 0, 5, 20), (5, 0, 5, 20)),
    "uneven rows": ((0, 0, 3, 20), (3, 0, 6, 20), (9, 0, 1, 20)),
    "columns": ((0, 0, 10, 7), (0, 7, 10, 13)),
    "tiles": ((0, 0, 4, 10), (0, 10, 4, 10), (4, 0, 6, 15), (4, 15, 6, 5)),
}


def matrix() -> torch.Tensor:
    return torch.arange(200, dtype=torch.float32).view(SHAPE) / 7


def sharded(cut: Cut, *, filled: bool) -> ShardedTensor:
    size = dist.get_world_size()
    shards = [
        ShardMetadata([row, column], [rows, columns], placement=f"rank:{number % size}/cpu")
        for number, (row, column, rows, columns) in enumerate(cut)
    ]
    made = empty_sharded(EnumerableShardingSpec(shards), *SHAPE)
    for shard in made.local_shards():
        shard.tensor.copy_(of(shard) if filled else torch.zeros(shard.tensor.shape))
    return made


def of(shard: Shard) -> torch.Tensor:
    (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
    return matrix()[row : row + rows, column : column + columns]


def is_right(tensor: ShardedTensor) -> bool:
    return all(torch.equal(shard.tensor, of(shard)) for shard in tensor.local_shards())


def every_pair_of_cuts(url: str) -> list[str]:
    """Save in each layout, load each of them in each; return the pairs that came out wrong."""
    wrong = []
    for step, (saved, cut) in enumerate(CUTS.items(), 1):
        writer = StorageWriter(url, step, chunk_nbytes=64)
        dcp.save({"a": {"b": sharded(cut, filled=True)}}, storage_writer=writer)
        for loaded, other in CUTS.items():
            into = sharded(other, filled=False)
            dcp.load({"a": {"b": into}}, storage_reader=StorageReader(url, step))
            if not is_right(into):
                wrong.append(f"{saved} -> {loaded}")
    return wrong


def sharded_and_plain(url: str) -> list[bool]:
    """Load what was sharded into a plain tensor, and the reverse."""
    whole = torch.zeros(SHAPE)
    dcp.save({"t": sharded(CUTS["tiles"], filled=True)}, storage_writer=StorageWriter(url, 1))
    dcp.load({"t": whole}, storage_reader=StorageReader(url))
    into = sharded(CUTS["columns"], filled=False)
    dcp.save({"t": matrix()}, storage_writer=StorageWriter(url, 2))
    dcp.load({"t": into}, storage_reader=StorageReader(url))
    return [torch.equal(whole, matrix()), is_right(into)]


def blobs(url: str) -> dict[str, Any]:
    state = {"list": [1], "text": "string", "rank": {"deep": {"er": (1, 2.5, None)}}, "step": 7}
    dcp.save({**state, "linear": torch.nn.Linear(3, 2).state_dict()}, storage_writer=StorageWriter(url))
    into: dict[str, Any] = {
        "list": [9],
        "text": "other",
        "rank": {"deep": {"er": 0}},
        "linear": torch.nn.Linear(3, 2).state_dict(),
        "step": -1,
    }
    dcp.load(into, storage_reader=StorageReader(url))
    return {name: into[name] for name in ("list", "text", "rank", "step")}


Spec: TypeAlias = tuple[str, tuple[int, ...], str, tuple[int | None, ...]]
"""Name, shape, dtype, and for each axis of the mesh the dimension that it shards."""


def dtensors(specs: Sequence[Spec], mesh: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return tensors of random bits, the same on all ranks."""
    made: dict[str, torch.Tensor] = {}
    for name, shape, dtype, layout in specs:
        kind: torch.dtype = getattr(torch, dtype)
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        nbytes = torch.Size(shape).numel() * kind.itemsize
        full = torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8).view(kind).view(shape)
        placements: list[Placement] = [Replicate() if dim is None else ShardOf(dim) for dim in layout]
        made[name] = distribute_tensor(full, cpu_mesh(mesh), placements, src_data_rank=None)
    return made


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return local(tensor).contiguous().flatten().view(torch.uint8)


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for tensor in tensors.values():
        bits_of = local(tensor)
        if bits_of.numel():
            bits_of.view(torch.uint8).zero_()
    return tensors


def differing(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in wanted if not torch.equal(bits(wanted[name]), bits(found[name]))]
