"""Whether all ranks describe the same items, tensors and values, and which number each tensor has in the manifest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from resilient.catalog.refusals import divergent, in_words, title
from resilient.errors import ConflictError, ErrorKind
from resilient.format.documents import Item, Tensor, Value
from resilient.format.dtypes import ITEMSIZE
from resilient.format.receipts import OWN, Slot, Structure

_MAX_ELEMENTS: Final = 1 << 62
"""Of all tensors: their elements are numbered with 64 bits."""

_Name: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Which of the different structures each rank has; those are in the order of the first ranks that have them."""

    structures: Sequence[Structure]
    structure_of: Sequence[int]

    def first(self) -> list[int]:
        """Return the first rank of each structure."""
        return [self.structure_of.index(which) for which in range(len(self.structures))]

    def with_item(self, name: str, end: int) -> list[int]:
        """Return the ranks before ``end`` that have an item of this name."""
        has = [any(item.name == name for item in each.items) for each in self.structures]
        return [rank for rank, which in enumerate(self.structure_of[:end]) if has[which]]


@dataclass(slots=True)
class Numbers:
    """The tensors of all ranks: first those that ranks share, as they come up, then each rank's own.

    ``of``: for each structure, the number of each of its tensors; -1 - k stands for the k-th one of a rank's own.
    ``own_from``: for each rank, the number of its first own one.
    """

    tensors: list[Tensor] = field(default_factory=list)
    of: list[npt.NDArray[np.int64]] = field(default_factory=list)
    own_from: list[int] = field(default_factory=list)

    def of_rank(self, rank: int, which: int) -> npt.NDArray[np.int64]:
        """Return the number of each tensor that a rank of this structure describes."""
        own = self.of[which] < 0
        return np.where(own, self.own_from[rank] - 1 - self.of[which], self.of[which])


def merge_items(ranks: Ranks) -> dict[str, Item]:
    """Return all items by name.

    Raises:
        ConflictError: ranks describe one differently, or one that is per rank and cannot be derived is missing on some.
    """
    items: dict[str, Item] = {}
    for structure, rank in zip(ranks.structures, ranks.first(), strict=True):
        for item in structure.items:
            if items.setdefault(item.name, item) != item:
                holders = ranks.with_item(item.name, rank + 1)
                raise divergent(f"item {item.name!r}", holders, "is described differently")
    for name, item in items.items():
        if not item.per_rank or item.derived:
            continue
        absent = sorted(set(range(len(ranks.structure_of))).difference(ranks.with_item(name, len(ranks.structure_of))))
        if absent:
            raise ConflictError(
                f"per-rank item {name!r} is missing on {in_words(absent)}",
                kind=ErrorKind.INCOMPLETE,
                hint="every rank must save a per-rank item",
                rank=absent[0],
            )
    return items


def merge_tensors(ranks: Ranks, items: dict[str, Item]) -> Numbers:
    """Return all tensors, numbered.

    Raises:
        ConflictError: ranks describe one differently, or one cannot be.
    """
    found = Numbers()
    shared: dict[_Name, tuple[int, int]] = {}  # the number, and the first rank
    owned: list[list[Tensor]] = []
    for structure, rank in zip(ranks.structures, ranks.first(), strict=True):
        own: dict[_Name, int] = {}
        owned.append([])
        numbers = []
        for tensor in structure.tensors:
            check_owner(tensor, rank, items)
            _check_dtype(tensor, rank)
            name = (tensor.item, tensor.name)
            if tensor.rank == OWN:
                number = own.setdefault(name, len(own))
                owned[-1].extend([tensor] if number == len(owned[-1]) else [])
                known, holder = owned[-1][number], rank
                numbers.append(-1 - number)
            else:
                number, holder = shared.setdefault(name, (len(shared), rank))
                found.tensors.extend([tensor] if number == len(found.tensors) else [])
                known = found.tensors[number]
                numbers.append(number)
            if known != tensor:
                whose = rank if tensor.rank == OWN else None
                raise divergent(title(tensor, whose), (holder, rank), _difference(known, tensor))
        found.of.append(np.array(numbers, np.int64))
    for rank, which in enumerate(ranks.structure_of):
        found.own_from.append(len(found.tensors))
        found.tensors.extend(msgspec.structs.replace(each, rank=rank) for each in owned[which])
    _check_extent(found.tensors)
    return found


def merge_values(values: Iterable[Sequence[Value]]) -> tuple[Value, ...]:
    """Return the values of all ranks, each once; ``values`` are each rank's, in the order of ranks.

    Raises:
        ConflictError: ranks have different ones.
    """
    merged: dict[tuple[str, str, int | None], tuple[Value, int]] = {}
    for rank, each in enumerate(values):
        for value in each:
            known, holder = merged.setdefault((value.item, value.name, value.rank), (value, rank))
            if known is not value and known != value:
                raise divergent(title(value, value.rank), (holder, rank), "has different values")
    return tuple(value for value, _ in merged.values())


def check_owner(leaf: Tensor | Slot, rank: int, items: dict[str, Item]) -> None:
    """Refuse a leaf of a rank's structure that belongs to no item, or to another rank."""
    item = items.get(leaf.item)
    if item is not None and leaf.rank == (OWN if item.per_rank else None):
        return
    named = title(leaf, rank if leaf.rank == OWN else leaf.rank)
    if item is None:
        raise ConflictError(f"{named} belongs to no item of the receipts", kind=ErrorKind.INCOMPLETE, rank=rank)
    raise ConflictError(f"{named} is in the receipt of rank {rank}", kind=ErrorKind.DIVERGENT, rank=rank)


def _check_dtype(tensor: Tensor, rank: int) -> None:
    if tensor.dtype not in ITEMSIZE:
        named = title(tensor, rank if tensor.rank == OWN else None)
        message = f"{named} has the unknown dtype {tensor.dtype!r}"
        raise ConflictError(message, kind=ErrorKind.DIVERGENT, rank=rank)


def _check_extent(tensors: Sequence[Tensor]) -> None:
    total = 0
    for tensor in tensors:
        total += math.prod(tensor.shape)
        if total > _MAX_ELEMENTS or min(tensor.shape, default=0) < 0:
            message = f"{title(tensor, tensor.rank)} has the shape {list(tensor.shape)}, which cannot be"
            raise ConflictError(message, kind=ErrorKind.DIVERGENT)


def _difference(known: Tensor, other: Tensor) -> str:
    if known.shape != other.shape:
        return f"has shape {list(known.shape)} and {list(other.shape)}"
    if known.dtype != other.dtype:
        return f"has dtype {known.dtype} and {other.dtype}"
    return "is described differently"
