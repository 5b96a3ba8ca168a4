"""Whether chunks cover tensors once each, for many tensors at a time: which copies count, and which tensors are wrong.

Only whether, not why: that is for `explaining`, which looks at one tensor slowly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from resilient.format.box import overlaps
from resilient.format.chunks import NOT_HERE, Boxes, Chunks
from resilient.format.tiling import unseparated

_Numbers: TypeAlias = npt.NDArray[np.int64]
_NONE: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Covered:
    """``rows``: the copies that count, by tensor and offset; ``parts``: their boxes.

    ``wrong``: the tensors that are not covered once each.
    """

    rows: _Numbers
    parts: Boxes
    wrong: _Numbers


def cover(chunks: Chunks, rows: _Numbers, keys: _Numbers, first: int, volumes: _Numbers) -> Covered:
    """Look at all rows of consecutive tensors.

    Args:
        chunks: the table; none of the rows is empty.
        rows: those of these tensors, in the order of ``keys``.
        keys: for each row, the number of its first element among those of all tensors.
        first: the number of the first of these tensors.
        volumes: how many elements each of these tensors has to have.
    """
    rows, starts = _grouped(chunks.boxes, rows, keys)
    stored = _lowest(rows, starts, chunks.places.object[rows] != NOT_HERE)
    boxes = chunks.boxes.take(rows[starts])
    here = stored != _NONE
    parts, held = (boxes, boxes.take(slice(0))) if here.all() else (boxes.take(here), boxes.take(~here))
    begins = np.flatnonzero(np.diff(parts.tensor, prepend=-1))
    found = np.zeros(len(volumes), np.int64)
    found[parts.tensor[begins] - first] = np.add.reduceat(parts.volume, begins) if len(begins) else 0
    wrong = [
        boxes.tensor[_conflicting(chunks, rows, starts)],
        _overlapping(parts),
        _crossing(held.take(held.volume != volumes[held.tensor - first]), parts),
        np.flatnonzero(found != volumes) + first,
    ]
    return Covered(rows=stored[here], parts=parts, wrong=np.unique(np.concatenate(wrong)))


def _grouped(boxes: Boxes, rows: _Numbers, keys: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Return the rows so that equal boxes follow each other, and where each group of equal ones begins."""
    same = np.flatnonzero(keys[1:] == keys[:-1])
    differs = (boxes.size[rows[same]] != boxes.size[rows[same + 1]]).any(axis=1)
    if differs.any():  # boxes that begin at the same element and have different sizes
        order = np.lexsort((*boxes.size[rows].T[::-1], keys))
        rows, keys = rows[order], keys[order]
        same = np.flatnonzero(keys[1:] == keys[:-1])
        differs = (boxes.size[rows[same]] != boxes.size[rows[same + 1]]).any(axis=1)
    begins = np.ones(len(rows), bool)
    begins[same[~differs] + 1] = False
    return rows, np.flatnonzero(begins)


def _lowest(numbers: _Numbers, starts: _Numbers, counts: npt.NDArray[np.bool_]) -> _Numbers:
    """Return the lowest number of each group among those that count; `_NONE` where none does."""
    if not len(starts):
        return np.empty(0, np.int64)
    return np.minimum.reduceat(np.where(counts, numbers, _NONE), starts)


def _conflicting(chunks: Chunks, rows: _Numbers, starts: _Numbers) -> npt.NDArray[np.bool_]:
    """Say for each group of equal boxes whether two of its digests differ."""
    wrong = np.zeros(len(starts), bool)
    if len(starts) == len(rows):
        return wrong  # nothing is there twice
    group = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(rows)))
    digested = chunks.places.digested[rows]
    first = _lowest(np.arange(len(rows)), starts, digested)[group]
    compared = np.flatnonzero(digested & (first != np.arange(len(rows))))
    digest = np.ascontiguousarray(chunks.places.digest).view(np.uint64)
    differ = (digest[rows[compared]] != digest[rows[first[compared]]]).any(axis=1)
    wrong[group[compared[differ]]] = True
    return wrong


def _overlapping(parts: Boxes) -> _Numbers:
    """Return the tensors with parts that overlap."""
    doubtful = unseparated(parts)
    tensors = parts.tensor[doubtful]
    return np.array(
        [
            number
            for number in np.unique(tensors).tolist()
            if overlaps([parts.box(row) for row in doubtful[tensors == number].tolist()]) is not None
        ],
        np.int64,
    )


def _crossing(held: Boxes, parts: Boxes) -> _Numbers:
    """Return the tensors of which a box that is only held is not made of whole parts."""
    mine, theirs = parts.meeting(held)
    inside = (parts.offset[mine] >= held.offset[theirs]) & (parts.end[mine] <= held.end[theirs])
    return np.unique(parts.tensor[mine[~inside.all(axis=1)]]).astype(np.int64)
