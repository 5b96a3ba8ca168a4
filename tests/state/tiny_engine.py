"""The smallest engine there is: what `capture` yields, merged in memory, and what `prepare` asks for, filled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from resilient.format.box import Box
from resilient.format.chunks import Chunks
from resilient.format.documents import Item, Manifest, Tensor, Value
from resilient.state.capture import capture
from resilient.state.leaves import Captured
from resilient.state.prepare import Loading, prepare
from resilient.state.tensors import dtype_of

Place = tuple[str, str, int | None]


class Part(NamedTuple):
    """A box of a tensor as bytes: crosses processes."""

    tensor: Tensor
    box: Box
    data: bytes
    holders: tuple[int, ...] | None


class Share(NamedTuple):
    """All of one rank."""

    items: tuple[Item, ...]
    parts: tuple[Part, ...]
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Saved:
    manifest: Manifest
    whole: dict[Place, torch.Tensor]

    def fill(self, loading: Loading) -> None:
        for target in loading.targets:
            place = (target.tensor.item, target.tensor.name, target.tensor.rank)
            assert tuple(target.into.shape) == target.box.size
            assert target.box.volume
            target.into.copy_(self.whole[place][target.box.relative_to(Box.whole(target.tensor.shape))])
        loading.finish()

    @property
    def nbytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.whole.values())


def bits(tensor: torch.Tensor) -> bytes:
    # Not contiguous(): a single element counts as contiguous whatever its stride, and then has no view as bytes.
    dense = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def share(captured: Captured) -> Share:
    parts = [
        Part(
            Tensor(leaf.item, leaf.name, leaf.path, leaf.dtype, leaf.shape, leaf.rank, leaf.alias),
            leaf.box,
            b"" if leaf.alias else bits(local),
            leaf.holders,
        )
        for leaf, local in zip(captured.tensors, captured.locals, strict=True)
    ]
    for leaf, local in zip(captured.tensors, captured.locals, strict=True):
        assert tuple(local.shape) == leaf.box.size
        assert leaf.box.within(leaf.shape)
        assert not local.requires_grad
    values = tuple(Value(leaf.item, leaf.name, leaf.path, leaf.data, leaf.rank) for leaf in captured.values)
    return Share(captured.items, tuple(parts), values)


def merge(shares: Sequence[Share], step: int = 1) -> Saved:
    """Merge what all ranks hold; every element must be held by somebody, and copies must be equal."""
    tensors: dict[Place, Tensor] = {}
    whole: dict[Place, torch.Tensor] = {}
    held: dict[Place, torch.Tensor] = {}
    values: dict[Place, Value] = {}
    items: dict[str, Item] = {}
    for rank, each in enumerate(shares):
        items |= {item.name: item for item in each.items}
        for part in each.parts:
            place = (part.tensor.item, part.tensor.name, part.tensor.rank)
            assert tensors.setdefault(place, part.tensor) == part.tensor
            assert part.holders is None or rank in part.holders or not part.box.volume
            if part.tensor.alias:
                continue
            dtype = dtype_of(part.tensor.dtype)
            if place not in whole:
                whole[place] = torch.empty(part.tensor.shape, dtype=dtype)
                held[place] = torch.zeros(part.tensor.shape, dtype=torch.bool)
            if not part.box.volume:
                continue
            index = part.box.relative_to(Box.whole(part.tensor.shape))
            local = torch.frombuffer(bytearray(part.data), dtype=dtype).reshape(part.box.size)
            if held[place][index].any():
                assert bits(whole[place][index]) == part.data, f"rank {rank} has another {place}"
            whole[place][index] = local
            held[place][index] = True
        for value in each.values:
            place = (value.item, value.name, value.rank)
            assert values.setdefault(place, value) == value
    for place, mask in held.items():
        assert mask.all(), f"nobody holds all of {place}"
    manifest = Manifest(
        step=step,
        generation=1,
        nonce="0" * 16,
        world_size=len(shares),
        items=tuple(items.values()),
        tensors=tuple(tensors.values()),
        objects=(),
        chunks=Chunks.of(()),
        values=tuple(values.values()),
        receipts=(),
    )
    return Saved(manifest, whole)


def save(items: Mapping[str, object], step: int = 1) -> Saved:
    """Save as one process."""
    return merge([share(capture(items, rank=0, world_size=1))], step)


def load(saved: Saved, items: Mapping[str, object], *, strict: bool = True) -> list[str]:
    """Load as one process; return the notices."""
    notices: list[str] = []
    saved.fill(prepare(items, saved.manifest, rank=0, world_size=1, strict=strict, notices=notices))
    return notices


def same(a: Any, b: Any) -> bool:
    """Compare structures, tensors by bits, dtype and shape."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and repr(a) == repr(b)


def names(leaves: Iterable[Any]) -> set[str]:
    return {leaf.name for leaf in leaves}
