"""Capturing the same items again and again: what has not changed is not worked out anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from resilient.errors import UsageError
from resilient.format import values
from resilient.format.documents import Item
from resilient.state.capture import Gathered, captured_of, gather
from resilient.state.collector import nothing_collected
from resilient.state.gathering import resolved
from resilient.state.items import described, unwrapped
from resilient.state.leaves import Captured, TensorLeaf, ValueLeaf
from resilient.state.scan import SCALARS, DoubtfulError, Scan, Scanner, scanner_of
from resilient.state.sharding import place

_PLAIN: Final = frozenset({torch.Tensor, nn.Parameter})

_shape = attrgetter("shape")
_dtype = attrgetter("dtype")
_is_meta = attrgetter("is_meta")
_described = attrgetter("item", "name", "path", "dtype", "shape", "box", "holders", "rank", "alias")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Known:
    """A capture, and what has to be found again for its leaves to be those of now.

    Nothing here keeps the memory of a tensor alive. ``counts``: how many leaves each tensor has. ``raw``: the values
    before they were encoded.
    """

    items: tuple[Item, ...]
    tensors: tuple[TensorLeaf, ...]
    values: tuple[ValueLeaf, ...]
    raw: list[object]
    scanners: tuple[Scanner, ...]
    marks: list[object]
    counts: list[int]


class Capturer:
    """Captures some items, as `capture` does, with the same results and errors.

    As long as no leaf has another name, shape, dtype, box, holder or alias, ``tensors`` is one and the same tuple, and
    a capture costs one or two microseconds per tensor. A change is looked for every time, never assumed absent;
    whatever is doubtful is captured in full.
    """

    def __init__(self, items: Mapping[str, object], *, rank: int, world_size: int) -> None:
        described(items)  # raises for what is no items by name
        self._items = dict(items)
        self._rank = rank
        self._world_size = world_size
        self._known: _Known | None = None
        self._tensors: tuple[TensorLeaf, ...] = ()

    def capture(self) -> Captured:
        """Return what this process holds of the items now; raises what `resilient.state.capture.capture` raises."""
        return self._again() or self._anew()

    def _again(self) -> Captured | None:
        """Return a capture with the leaves of the last one, or None if something about them has changed."""
        known = self._known
        if known is None:
            return None
        try:
            scans = [scan() for scan in known.scanners]
            tensors = [tensor for scan in scans for tensor in scan.tensors]
            if _marks(scans, tensors) != known.marks:
                return None
            locals_ = _locals(tensors, known)
            raw = [value for scan in scans for value in scan.values]
            new = _encoded(raw, known)
        except (values.Unsaveable, UsageError):
            return None  # a full capture names it
        if any(map(_is_meta, locals_)):
            return None  # refused by name
        self._known = replace(known, raw=raw, values=new)
        return Captured(items=known.items, tensors=known.tensors, locals=tuple(locals_), values=new)

    @nothing_collected()
    def _anew(self) -> Captured:
        gathered = gather(self._items, rank=self._rank, world_size=self._world_size)
        captured = captured_of(gathered)
        if len(captured.tensors) == len(self._tensors) and all(map(_alike, captured.tensors, self._tensors)):
            captured = replace(captured, tensors=self._tensors)
        self._tensors = captured.tensors
        self._known = self._learned(gathered, captured)
        return captured

    def _learned(self, gathered: Gathered, captured: Captured) -> _Known | None:
        """Return what makes the next capture cheap; None if it had better be a full one too."""
        try:
            scanners = tuple(
                scanner_of(item, unwrapped(self._items[item.name]), gathered.owners) for item in gathered.items
            )
            scans = [scan() for scan in scanners]
        except (DoubtfulError, values.Unsaveable, UsageError):
            return None
        for scan, into in zip(scans, gathered.found, strict=True):
            if len(scan.tensors) != len(into.counts) or len(scan.values) != len(into.values):
                return None  # an item that is asked for its state, and answers differently each time
        return _Known(
            items=captured.items,
            tensors=captured.tensors,
            values=captured.values,
            raw=[value for scan in scans for value in scan.values],
            scanners=scanners,
            marks=_marks(scans, [tensor for scan in scans for tensor in scan.tensors]),
            counts=[count for into in gathered.found for count in into.counts],
        )


def _alike(one: TensorLeaf, other: TensorLeaf) -> bool:
    return bool(_described(one) == _described(other))


def _marks(scans: Sequence[Scan], tensors: Sequence[Tensor]) -> list[object]:
    """Return what is equal for two scans if and only if their leaves are described alike."""
    kinds = list(map(type, tensors))
    marks: list[object] = [(scan.shape, len(scan.tensors), len(scan.values), _firsts(scan.tensors)) for scan in scans]
    marks += [kinds, list(map(_shape, tensors)), list(map(_dtype, tensors))]
    if DTensor in kinds:
        sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        locals_ = [tensor._local_tensor for tensor in sharded]  # noqa: SLF001 -- to_local() takes ten times as long
        marks.append([(tensor.device_mesh, tensor.placements) for tensor in sharded])
        marks += [list(map(type, locals_)), list(map(_shape, locals_))]
    return marks


def _firsts(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return at which place each tensor comes first, if any comes twice: the others are aliases."""
    ids = list(map(id, tensors))
    if len(set(ids)) == len(ids):
        return None
    first: dict[int, int] = {}
    return [first.setdefault(each, at) for at, each in enumerate(ids)]


def _locals(tensors: Sequence[Tensor], known: _Known) -> list[Tensor]:
    """Return the live elements of each leaf."""
    if known.counts.count(1) == len(tensors) and _PLAIN.issuperset(map(type, tensors)):
        found = list(tensors)
    else:
        found = []
        for tensor, count in zip(tensors, known.counts, strict=True):
            found += _parts(tensor, known.tensors[len(found) : len(found) + count])
    if any(dtype.is_complex for dtype in set(map(_dtype, found))) or any(map(Tensor.is_neg, found)):
        return [resolved(each.detach()) for each in found]
    return found


def _parts(tensor: Tensor, leaves: Sequence[TensorLeaf]) -> list[Tensor]:
    if not isinstance(tensor, DTensor):
        return [tensor] * len(leaves)
    local = tensor._local_tensor  # noqa: SLF001 -- as above
    if len(leaves) == 1 and leaves[0].box.size == local.shape:
        return [local.detach()]
    return [part for _, part in place(tensor).parts[: len(leaves)]]


def _encoded(raw: Sequence[object], known: _Known) -> tuple[ValueLeaf, ...]:
    """Return the values as they are now: encoded again, unless they are the same object and cannot change."""
    return tuple(
        leaf if value is last and type(value) in SCALARS else _with_data(leaf, values.encode(value))
        for value, last, leaf in zip(raw, known.raw, known.values, strict=True)
    )


def _with_data(leaf: ValueLeaf, data: bytes) -> ValueLeaf:
    return leaf if data == leaf.data else replace(leaf, data=data)
