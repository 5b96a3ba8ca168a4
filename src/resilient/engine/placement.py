"""Where each piece of a state lies: in which data object, and where in a slot of the arena."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from resilient.engine.division import Piece, is_plain
from resilient.format.chunks import NOT_HERE
from resilient.format.documents import Item, Tensor
from resilient.format.dtypes import ITEMSIZE
from resilient.state.leaves import Captured, TensorLeaf
from resilient.writer.messages import Structure

MAX_OBJECT_NBYTES: Final = 1 << 30
SMALL_NBYTES: Final = 64 << 10
"""Replicas up to this size are compared between ranks at every commit."""

_ALIGN: Final = 16  # the largest element (complex128)


class Placed(msgspec.Struct, frozen=True):
    """A piece, its place (part number and start) in the object that stores it, and its place in the slot's payload.

    ``object`` is `NOT_HERE` for what another rank stores; ``at`` is -1 for what is not staged.
    """

    piece: Piece
    object: int
    start: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """All pieces of a rank. Each object, ``(at, nbytes)``, is one range of the payload and starts on a page.

    ``spares`` are further ranges that become objects, with the next part numbers, if it turns out that no other rank
    stores what lies in them. ``nbytes``: how much of the payload is used.
    """

    placed: tuple[Placed, ...]
    objects: tuple[tuple[int, int], ...]
    spares: tuple[tuple[int, int], ...]
    nbytes: int

    @property
    def stored_nbytes(self) -> int:
        """Bytes that this rank stores if it stores no spares."""
        return sum(nbytes for _, nbytes in self.objects)


def place(
    captured: Captured, pieces: Sequence[Piece], *, rank: int, agreed: bool | None, compare_all: bool
) -> Placement:
    """Return where the pieces go.

    Args:
        captured: what this rank holds.
        pieces: all of it, cut by `divide`.
        rank: this one.
        agreed: whether all ranks hold the same plain tensors. None: not yet known; then those that another rank would
            store are staged too, as spares.
        compare_all: large replicas that another rank stores are staged too, so that the commit can compare them: the
            first time that a structure is saved.
    """
    placed: list[Placed] = []
    mine = [each for each in pieces if each.owner in (None, rank)]
    objects, end = _pack(captured, mine, 0, 0, placed)
    others = [each for each in pieces if each.owner not in (None, rank)]
    uncertain = [each for each in others if agreed is None and is_plain(captured.tensors[each.leaf])]
    spares, end = _pack(captured, uncertain, end, len(objects), placed)
    for piece in others:
        if agreed is None and is_plain(captured.tensors[piece.leaf]):
            continue
        is_staged = piece.replicated and (compare_all or piece.nbytes <= SMALL_NBYTES)
        placed.append(Placed(piece, NOT_HERE, 0, end if is_staged else -1))
        end += _up(piece.nbytes, _ALIGN) if is_staged else 0
    return Placement(placed=tuple(placed), objects=objects, spares=spares, nbytes=end)


def _pack(
    captured: Captured, pieces: Sequence[Piece], at: int, part: int, placed: list[Placed]
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Lay pieces back to back into objects from ``at`` and ``part`` on; return the objects and where they end.

    Wide elements come first. A piece's length is a multiple of its element's size, so that in this order every piece
    is aligned without a gap between two: an object is one range of memory, and is written as it lies there.
    """
    objects: list[tuple[int, int]] = []
    nbytes = 0
    for piece in sorted(pieces, key=lambda each: -ITEMSIZE[captured.tensors[each.leaf].dtype]):
        if nbytes and nbytes + piece.nbytes > MAX_OBJECT_NBYTES:
            objects.append((at, nbytes))
            at, nbytes = _up(at + nbytes, mmap.PAGESIZE), 0
        placed.append(Placed(piece, part + len(objects), nbytes, at + nbytes))
        nbytes += piece.nbytes
    if pieces:
        objects.append((at, nbytes))
    return tuple(objects), _up(at + nbytes, mmap.PAGESIZE)


def structure_of(
    items: Sequence[Item],
    leaves: Sequence[TensorLeaf],
    placement: Placement,
    number: int,
    *,
    with_spares: bool = False,
) -> Structure:
    """Return what the writer has to know of a placement; ``with_spares``: this rank stores those too."""
    objects = placement.objects + (placement.spares if with_spares else ())
    tensors: dict[tuple[str, str], int] = {}
    described: list[Tensor] = []
    for leaf in leaves:
        if (leaf.item, leaf.name) not in tensors:
            tensors[leaf.item, leaf.name] = len(described)
            described.append(Tensor(leaf.item, leaf.name, leaf.path, leaf.dtype, leaf.shape, leaf.rank, leaf.alias))
    number_of = [tensors[leaf.item, leaf.name] for leaf in leaves]
    placed = placement.placed
    here = [each.object < len(objects) for each in placed]
    return Structure(
        number=number,
        items=tuple(items),
        tensors=tuple(described),
        objects=objects,
        tensor=_column([number_of[each.piece.leaf] for each in placed]),
        object=_column([each.object if is_here else NOT_HERE for each, is_here in zip(placed, here, strict=True)]),
        start=_column([each.start if is_here else 0 for each, is_here in zip(placed, here, strict=True)]),
        nbytes=_column([each.piece.nbytes for each in placed]),
        at=_column([each.at for each in placed]),
        offset=_column([number for each in placed for number in each.piece.box.offset]),
        size=_column([number for each in placed for number in each.piece.box.size]),
    )


def _column(numbers: Sequence[int]) -> bytes:
    return np.array(numbers, dtype="<i8").tobytes()


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
