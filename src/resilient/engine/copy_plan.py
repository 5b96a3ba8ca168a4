"""Which copies stage a state: ranges of memory where elements lie as they are stored, everything else apart."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from torch import Tensor

from resilient.engine.copying import MAX_SEGMENTS, Copy, Gather, Move, Read
from resilient.engine.placement import Placed, Placement
from resilient.engine.torn import Probe
from resilient.errors import ErrorKind, StoreError
from resilient.format.box import Box
from resilient.format.dtypes import ITEMSIZE
from resilient.state.collector import nothing_collected
from resilient.state.leaves import TensorLeaf

PIECE_NBYTES: Final = 4 << 20
"""What one copy moves at most: how long a fence may have to wait for a copy that another thread has begun."""

_SMALL_NBYTES: Final = 32 << 10


class Run(msgspec.Struct, frozen=True):
    """Consecutive bytes of a leaf, in row-major order, that stay consecutive in the slot."""

    leaf: int
    offset: int
    at: int
    nbytes: int
    placed: tuple[Placed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """What one staging does: at once, and while the next turn runs (``later_leaves`` are read then)."""

    now: Sequence[Copy]
    later: Sequence[Copy]
    device_now: Sequence[Run]
    device_later: Sequence[Run]
    later_leaves: Sequence[int]
    probes: Sequence[Probe]


NOTHING: Final = Copies(now=(), later=(), device_now=(), device_later=(), later_leaves=(), probes=())


class CopyPlan:
    """The copies of a state that is staged again and again, worked out once.

    Where each tensor lies is looked at every time. One that has moved is taken for one that moves at every save (state
    that is made anew in every step, or asked for): its copies are worked out each time.
    """

    def __init__(
        self, leaves: Sequence[TensorLeaf], placement: Placement, overlapped: Collection[int], moving: Iterable[int]
    ) -> None:
        self.leaves = leaves
        self.placement = placement
        self.overlapped = frozenset(overlapped)
        self._runs = _runs_of(leaves, placement)
        self._moving = set(moving)
        self._marks: list[int | None] | None = None
        self._kept: Copies | None = None

    @property
    def moving(self) -> frozenset[int]:
        """The leaves whose tensors were not where they had been."""
        return frozenset(self._moving)

    def copies(self, locals_: Sequence[Tensor]) -> Copies:
        """Return the copies of tensors where they are now; they must stay alive until these are done.

        Raises:
            StoreError: the memory of a tensor was given back (``untyped_storage().resize_(0)``).
        """
        marks: list[int | None] = list(map(Tensor.data_ptr, locals_))
        in_order = list(map(Tensor.is_contiguous, locals_))
        if not all(in_order):
            # Copied through a view, which would keep the memory from one save to the next.
            self._moving.update(number for number, is_in_order in enumerate(in_order) if not is_in_order)
        for number in self._moving:
            marks[number] = None
        if self._kept is None or marks != self._marks:
            if self._marks is not None:
                moved = [n for n, (now, then) in enumerate(zip(marks, self._marks, strict=True)) if now != then]
                self._moving.update(moved)
                for number in moved:
                    marks[number] = None
            self._marks = marks
            self._kept = self._bound(locals_, set(range(len(locals_))) - self._moving)
        return _joined(self._kept, self._bound(locals_, self._moving)) if self._moving else self._kept

    @nothing_collected()
    def _bound(self, locals_: Sequence[Tensor], only: Collection[int]) -> Copies:
        now: list[Run] = []
        later: list[Run] = []
        for run in self._runs:
            if run.leaf in only:
                (later if run.leaf in self.overlapped else now).append(run)
        device_now, device_later = ([run for run in runs if not locals_[run.leaf].is_cpu] for runs in (now, later))
        copies = _copies_of((run for run in later if locals_[run.leaf].is_cpu), self.leaves, locals_)
        return Copies(
            now=_copies_of((run for run in now if locals_[run.leaf].is_cpu), self.leaves, locals_),
            later=copies,
            device_now=device_now,
            device_later=device_later,
            later_leaves=sorted({run.leaf for run in later}),
            probes=(Probe(copies),) if copies else (),
        )


def _joined(one: Copies, other: Copies) -> Copies:
    return Copies(**{name: [*getattr(one, name), *getattr(other, name)] for name in Copies.__slots__})


@nothing_collected()
def _runs_of(leaves: Sequence[TensorLeaf], placement: Placement) -> tuple[Run, ...]:
    """Return what is to be copied, by place in the slot."""
    open_: list[tuple[int, int, int, int, list[Placed]]] = []
    for placed in sorted((each for each in placement.placed if each.at >= 0), key=lambda each: each.at):
        piece = placed.piece
        leaf = leaves[piece.leaf]
        offset = _offset(piece.box, leaf.box) * ITEMSIZE[leaf.dtype]
        if open_:
            number, first, at, nbytes, parts = open_[-1]
            if (number, first + nbytes, at + nbytes) == (piece.leaf, offset, placed.at):
                parts.append(placed)
                open_[-1] = (number, first, at, nbytes + piece.nbytes, parts)
                continue
        open_.append((piece.leaf, offset, placed.at, piece.nbytes, [placed]))
    return tuple(Run(leaf, offset, at, nbytes, tuple(parts)) for leaf, offset, at, nbytes, parts in open_ if nbytes)


def _copies_of(runs: Iterable[Run], leaves: Sequence[TensorLeaf], locals_: Sequence[Tensor]) -> list[Copy]:
    """Return the copies of some ranges of leaves as they lie in memory now."""
    copies: list[Copy] = []
    small: list[tuple[int, int, int, int]] = []  # leaf, address, at, nbytes

    def flush() -> None:
        if small:
            copies.append(_gathered(small) if len(small) > 1 else Move(*small[0]))
            small.clear()

    addresses: dict[int, int | None] = {}
    for run in runs:
        local = locals_[run.leaf]
        if run.leaf not in addresses:
            addresses[run.leaf] = _address(leaves[run.leaf], local)
        address = addresses[run.leaf]
        if address is None:
            copies += (_read(leaves[run.leaf], local, placed) for placed in run.placed)
        elif run.nbytes > _SMALL_NBYTES:
            copies += (
                Move(run.leaf, address + run.offset + start, run.at + start, min(PIECE_NBYTES, run.nbytes - start))
                for start in range(0, run.nbytes, PIECE_NBYTES)
            )
        else:
            if small and (small[-1][2] + small[-1][3] != run.at or len(small) == MAX_SEGMENTS):
                flush()
            small.append((run.leaf, address + run.offset, run.at, run.nbytes))
    flush()
    return copies


def _gathered(small: Sequence[tuple[int, int, int, int]]) -> Gather:
    numbers, sources, ats, sizes = zip(*small, strict=True)
    return Gather(numbers, np.array([sources, sizes], dtype=np.uint64).T.copy(), ats[0], sum(sizes))


def _read(leaf: TensorLeaf, local: Tensor, placed: Placed) -> Read:
    piece = placed.piece
    return Read(piece.leaf, local.detach()[piece.box.relative_to(leaf.box)], placed.at, piece.nbytes)


def _address(leaf: TensorLeaf, local: Tensor) -> int | None:
    """Return where a tensor's bytes begin, or None if they do not lie there in the order in which they are stored."""
    in_order = local.is_contiguous()
    last = local.numel() - 1
    if not in_order:
        last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    if local.untyped_storage().nbytes() < (local.storage_offset() + last + 1) * local.element_size():
        raise StoreError(
            f"{leaf.item}: {leaf.name} has no memory any more: its storage was freed",
            kind=ErrorKind.SAVE_FAILED,
            hint="a state can be saved while its tensors hold it",
        )
    return local.data_ptr() if in_order else None


def _offset(box: Box, outer: Box) -> int:
    """Return at which element of a row-major ``outer`` a box begins."""
    if box.offset == outer.offset:
        return 0
    strides = [math.prod(outer.size[axis + 1 :]) for axis in range(len(outer.size))]
    starts = (inner - base for inner, base in zip(box.offset, outer.offset, strict=True))
    return sum(start * stride for start, stride in zip(starts, strides, strict=True))
