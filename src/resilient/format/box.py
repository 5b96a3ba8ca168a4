"""Which part of a tensor: boxes (offset, size), and how they split, meet and cover."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import msgspec


class Box(msgspec.Struct, frozen=True, order=True):
    """A box of a tensor: ``offset`` and ``size`` have one entry per dimension; a scalar has none."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that is all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """The number of elements; 1 for a scalar, 0 for an empty box."""
        return math.prod(self.size)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.offset, self.size, strict=True))

    def within(self, shape: Sequence[int]) -> bool:
        """Say whether this box lies inside a tensor of this shape."""
        return len(shape) == len(self.offset) and all(
            o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(self.offset, self.size, shape, strict=True)
        )

    def relative_to(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that take this box out of an array that holds ``outer``."""
        return tuple(
            slice(o - base, o - base + s) for o, s, base in zip(self.offset, self.size, outer.offset, strict=True)
        )


def intersect(a: Box, b: Box) -> Box | None:
    """Return what two boxes share, or None if that is not a single element."""
    offset = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    end = tuple(min(x, y) for x, y in zip(a.end, b.end, strict=True))
    size = tuple(e - o for o, e in zip(offset, end, strict=True))
    if any(s <= 0 for s in size):
        return None
    return Box(offset, size)


def split(box: Box, itemsize: int, max_nbytes: int) -> Iterator[Box]:
    """Cut a box into boxes of at most ``max_nbytes``, each contiguous in the row-major order of ``box``.

    The pieces come in that order, so that their bytes back to back are the bytes of ``box``. An empty box yields
    nothing.
    """
    if box.volume == 0:
        return
    # Cut along the first dimension whose single slice is small enough; all dimensions before it become 1.
    row_nbytes = box.volume * itemsize
    for axis, extent in enumerate(box.size):
        if row_nbytes <= max_nbytes:
            break
        row_nbytes //= extent
        if row_nbytes <= max_nbytes or axis == len(box.size) - 1:
            yield from _split_along(box, axis, max(1, max_nbytes // max(1, row_nbytes)))
            return
    yield box


def _split_along(box: Box, axis: int, rows: int) -> Iterator[Box]:
    leading = [range(o, o + s) for o, s in zip(box.offset[:axis], box.size[:axis], strict=True)]
    for prefix in itertools.product(*leading):
        for start in range(0, box.size[axis], rows):
            count = min(rows, box.size[axis] - start)
            yield Box(
                (*prefix, box.offset[axis] + start, *box.offset[axis + 1 :]),
                ((1,) * axis + (count,) + box.size[axis + 1 :]),
            )


def uncovered(shape: Sequence[int], boxes: Sequence[Box]) -> int:
    """Return how many elements of a tensor of this shape lie in none of the boxes.

    Exact for any set of boxes that overlap only where they are equal, in time linear in their number; partial overlaps
    are for `overlaps` to find first.
    """
    return math.prod(shape) - sum(box.volume for box in set(boxes))


def overlaps(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that overlap without being equal, or None.

    A sweep along the dimension that is cut most often: near linear for the grids that meshes make (the pairwise check
    of other libraries took minutes at 1,024 x 1,024 shards: pytorch/pytorch#163548).
    """
    distinct = {box for box in boxes if box.volume}
    dims = len(next(iter(distinct)).offset) if distinct else 0
    if dims == 0 or len(distinct) == 1:
        return None
    axis = max(range(dims), key=lambda dim: len({box.offset[dim] for box in distinct}))
    active: list[Box] = []
    for box in sorted(distinct, key=lambda one: one.offset[axis]):
        active = [other for other in active if other.end[axis] > box.offset[axis]]
        for other in active:
            if intersect(box, other) is not None:
                return other, box
        active.append(box)
    return None
