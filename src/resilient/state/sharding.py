"""Which boxes of a tensor this process holds, and which other ranks hold the same."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from resilient.format.box import Box
from resilient.state.tensors import local_of

Span: TypeAlias = tuple[int, int]
"""Consecutive indices along one dimension: the first, and how many."""

Region: TypeAlias = tuple[Box, tuple[slice, ...]]
"""A box of the global tensor, and where it lies in the local one."""


class UnknownLayoutError(Exception):
    """A layout whose local part cannot be told; the message says why. Callers turn it into a `UsageError`."""


class Placed(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What this process holds of a tensor.

    ``parts``: boxes with the live elements, of that size and without gradients; none at all on a rank outside the
    tensor's mesh.
    ``holders``: the global ranks that hold the same; None for a plain tensor, which does not say.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[Box, torch.Tensor], ...]
    holders: tuple[int, ...] | None


def place(tensor: torch.Tensor) -> Placed:
    """Return where the elements that this process holds lie in the whole.

    Raises:
        UnknownLayoutError: a pending reduction, an unknown placement, or a local part of another size than they give.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        live = tensor.detach() if tensor.requires_grad else tensor  # which takes longer than all else here
        return Placed(shape=shape, parts=((Box.whole(shape), live),), holders=None)
    layout = _layout(shape, tensor.device_mesh, tensor.placements)
    if layout is None:
        return Placed(shape=shape, parts=(), holders=())
    found, holders = layout
    local = local_of(tensor)
    parts = tuple((box, local[index]) for box, index in found)
    if (
        any(tuple(part.shape) != box.size for box, part in parts)
        or sum(box.volume for box, _ in parts) != local.numel()
    ):
        raise UnknownLayoutError(
            f"a DTensor of shape {shape}, placed as {tensor.placements} on a mesh of shape {tensor.device_mesh.shape}, "
            f"whose local part has shape {tuple(local.shape)}, not the one that these placements give"
        )
    return Placed(shape=shape, parts=parts, holders=holders)


@functools.lru_cache(maxsize=65536)
def _layout(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[tuple[Region, ...], tuple[int, ...]] | None:
    # Cached: the same few layouts come back at every save, in the training thread.
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    found = regions(shape, tuple(mesh.shape), tuple(coordinate), placements)
    same = tuple(slice(None) if isinstance(p, Replicate) else c for p, c in zip(placements, coordinate, strict=True))
    return found, tuple(sorted(mesh.mesh[same].flatten().tolist()))


def regions(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[Region, ...]:
    """Return what the process at ``coordinate`` of a mesh holds of a tensor, by one placement per mesh dimension.

    The boxes are disjoint, in the row-major order of the local tensor's blocks. An empty shard is one empty box.

    Raises:
        UnknownLayoutError: a pending reduction or an unknown placement.
    """
    for placement in placements:
        _check(placement)
    spans: list[list[Span]] = []
    for dim, extent in enumerate(shape):
        cuts = [
            (placement, size, index)
            for placement, size, index in zip(placements, mesh_shape, coordinate, strict=True)
            if isinstance(placement, Shard | _StridedShard) and placement.dim % len(shape) == dim
        ]
        spans.append(_held(extent, cuts) or [(extent, 0)])
    starts = [list(itertools.accumulate((length for _, length in held), initial=0)) for held in spans]
    return tuple(
        (
            Box(
                tuple(spans[d][i][0] for d, i in enumerate(choice)), tuple(spans[d][i][1] for d, i in enumerate(choice))
            ),
            tuple(slice(starts[d][i], starts[d][i + 1]) for d, i in enumerate(choice)),
        )
        for choice in itertools.product(*(range(len(held)) for held in spans))
    )


def _check(placement: Placement) -> None:
    if placement.is_partial():
        raise UnknownLayoutError(f"a DTensor placed as {placement}: its elements are not known before a reduction")
    if not isinstance(placement, Shard | _StridedShard | Replicate):
        raise UnknownLayoutError(f"a DTensor placed as {placement}, which this version does not know")


def _held(extent: int, cuts: Sequence[tuple[Placement, int, int]]) -> list[Span]:
    """Return the indices that are left of one dimension after all cuts, as spans in local order."""
    strided = [cut for cut in cuts if isinstance(cut[0], _StridedShard)]
    plain = [cut for cut in cuts if not isinstance(cut[0], _StridedShard)]
    held: list[Span] = [(0, extent)]
    if strided and _is_fsdp_over_tp(cuts):
        # FSDP2 cut what tensor parallelism had left. Reading the placements from left to right gives the same only for
        # even shards (7 rows on 3 x 2 ranks differ), so cut in the order in which it really happened.
        for _, count, index in (*plain, *strided):
            held = _chunk(held, count, index)
        return held
    for placement, count, index in cuts:
        factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
        pieces = (_chunk(held, int(factor), piece) for piece in range(int(factor)))
        held = _merged([span for piece in pieces for span in _chunk(piece, count, index)])
    return held


def _is_fsdp_over_tp(cuts: Sequence[tuple[Placement, int, int]]) -> bool:
    kinds = [isinstance(placement, _StridedShard) for placement, _, _ in cuts]
    behind = math.prod(size for placement, size, _ in cuts if not isinstance(placement, _StridedShard))
    return kinds == [True] + [False] * (len(kinds) - 1) and int(getattr(cuts[0][0], "split_factor", 0)) == behind


def _chunk(held: Sequence[Span], count: int, index: int) -> list[Span]:
    """Return the ``index``-th of ``count`` parts as `torch.chunk` cuts: of one size, the last ones smaller or empty."""
    total = sum(length for _, length in held)
    size = -(-total // count)
    begin, end = min(index * size, total), min((index + 1) * size, total)
    taken: list[Span] = []
    passed = 0
    for start, length in held:
        first, last = max(begin - passed, 0), min(end - passed, length)
        if first < last:
            taken.append((start + first, last - first))
        passed += length
    return taken


def _merged(spans: Sequence[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, length in spans:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return merged
