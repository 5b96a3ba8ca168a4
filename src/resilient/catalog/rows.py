"""The chunks of all receipts, in columns that grow in place: a large job has tens of millions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import numpy as np

from resilient.format.chunks import Boxes, Chunks, Column, Places, widened
from resilient.format.digest import NBYTES

_GROWTH: Final = 1.5


class Rows:
    """A table to which the tables of ranks are appended, in the order of ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._columns: dict[str, Column] = {}
        self.starts = [0]
        """Where the rows of each rank begin; and where the last ones end."""

    def __len__(self) -> int:
        return self.starts[-1]

    def append(self, chunks: Chunks, rows: Sequence[int]) -> None:
        """Add the rows of the next ranks: so many of each."""
        start, end = len(self), len(self) + len(chunks)
        added = _columns_of(chunks)
        if not self._columns:
            # Memory that is not touched costs nothing: there may be too much of it, and nothing is copied as it fills.
            capacity = max(max(rows) * self._ranks, 1)
            self._columns = {name: np.empty((capacity, *each.shape[1:]), each.dtype) for name, each in added.items()}
        for name, column in added.items():
            target = self._columns[name]
            if end > len(target) or column.shape[1:] != target.shape[1:] or column.itemsize > target.itemsize:
                filling = 1 if name == "size" else 0
                target = self._columns[name] = _with_room(target, column, start, end, filling)
                if target.ndim > 1:
                    column = widened(column, target.shape[1], filling)  # noqa: PLW2901 -- the same one
            target[start:end] = column
        self.starts += list(accumulate(rows, initial=start))[1:]

    def rank(self, rank: int) -> Chunks:
        """Return the rows of a rank: a view, which may be written to."""
        return self._table(slice(self.starts[rank], self.starts[rank + 1]))

    def all(self) -> Chunks:
        """Return all rows: a view."""
        return self._table(slice(0, len(self)))

    def pop(self, rows: Column) -> Chunks:
        """Return some rows and forget all, column by column: two copies of them would not fit."""
        taken: dict[str, Column] = {}
        for name in list(self._columns):
            taken[name] = self._columns.pop(name).take(rows, axis=0)
        return _chunks_of(taken)

    def _table(self, part: slice) -> Chunks:
        return _chunks_of({name: column[part] for name, column in self._columns.items()})


def _with_room(column: Column, added: Column, start: int, end: int, filling: int) -> Column:
    """Return a column that holds ``end`` rows, as wide and with as large numbers as the added ones."""
    if column.ndim > 1 and added.shape[1] > column.shape[1]:
        column = widened(column, added.shape[1], filling)
    if added.dtype.itemsize > column.dtype.itemsize:
        column = column.astype(added.dtype)
    if end > len(column):
        grown = np.empty((int(end * _GROWTH), *column.shape[1:]), column.dtype)
        grown[:start] = column[:start]
        column = grown
    return column


def _columns_of(chunks: Chunks) -> dict[str, Column]:
    boxes, places = chunks.boxes, chunks.places
    return {
        "tensor": boxes.tensor,
        "ndim": boxes.ndim,
        "offset": boxes.offset,
        "size": boxes.size,
        "object": places.object,
        "start": places.start,
        "nbytes": places.nbytes,
        "codec": places.codec,
        "digest": places.digest.reshape(-1, NBYTES),
        "digested": places.digested,
    }


def _chunks_of(columns: dict[str, Column]) -> Chunks:
    boxes = Boxes(**{name: columns[name] for name in ("tensor", "ndim", "offset", "size")})
    names = ("object", "start", "nbytes", "codec", "digest", "digested")
    return Chunks(boxes, Places(**{name: columns[name] for name in names}))
