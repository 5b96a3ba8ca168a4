"""Which chunks are read together: neighbors in one object, with one request, and straight to their place if they fit.

Reads so much per request that its latency does not matter, and over little that nobody wants.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from resilient.format.chunks import Chunks

ELSEWHERE: Final = -1
_GAP_NBYTES: Final = 4 << 10

Numbers: TypeAlias = npt.NDArray[np.int64]
_Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Span:
    """The chunks from row ``first`` to ``end``, as one range of their object, gaps included.

    Where ``address`` is not `ELSEWHERE`, the bytes belong there exactly as they are stored, and are read to that place.
    """

    start: int
    nbytes: int
    first: int
    end: int
    address: int

    def in_units(self, unit: int, object_nbytes: int) -> Span:
        """Return this span with all of the units that it has a part of, as far as the object goes."""
        start = self.start // unit * unit
        end = min(-(-(self.start + self.nbytes) // unit) * unit, max(object_nbytes, self.start + self.nbytes))
        return replace(self, start=start, nbytes=end - start)


class Line:
    """Chunks as if all objects were laid in one line, too far from each other for chunks of two to be neighbors."""

    def __init__(self, chunks: Chunks) -> None:
        objects, which = np.unique(chunks.places.object, return_inverse=True)
        ends = np.zeros(len(objects), np.int64)
        np.maximum.at(ends, which, chunks.places.start + chunks.places.nbytes)
        room = ends + _GAP_NBYTES + 1
        position = (np.cumsum(room) - room)[which] + chunks.places.start
        self.order: Numbers = np.argsort(position, kind="stable")
        """The numbers of the chunks in the order of the line: row r of it is the chunk ``order[r]``."""
        self.rows = chunks.take(self.order)
        self._position: Numbers = position[self.order]
        # Two rows may be one range: equal bytes are stored once.
        self._end: Numbers = np.maximum.accumulate(self._position + self.rows.places.nbytes)

    def spans(self, to: Numbers, most: int) -> list[Span]:
        """Return spans that have every row once, in the order of the line.

        Args:
            to: the address at which a row's stored bytes belong as they are, or `ELSEWHERE`.
            most: how many bytes long a span gets; only a longer row is read alone, and whole.
        """
        position, end, nbytes = self._position, self._end, self.rows.places.nbytes
        near = _run_ends(position[1:] - end[:-1] <= _GAP_NBYTES)
        on = (to[:-1] != ELSEWHERE) & (to[1:] == to[:-1] + nbytes[:-1]) & (position[1:] == position[:-1] + nbytes[:-1])
        straight = _run_ends(on)
        spans: list[Span] = []
        row = 0
        while row < len(self.rows):
            address = int(to[row])
            until = self._reach(row, near, most)
            if address != ELSEWHERE:
                alone = self._reach(row, straight, most)
                # To read a little to its place would cost a request of its own: more than the copy that it saves.
                if alone == until or end[alone - 1] - position[row] >= most // 4:
                    until = alone
                else:
                    address = ELSEWHERE
            start = int(self.rows.places.start[row])
            spans.append(Span(start, int(end[until - 1] - position[row]), row, until, address))
            row = until
        return spans

    def _reach(self, row: int, run_ends: Numbers, most: int) -> int:
        """Return the end of the rows that one request takes, from ``row`` on and inside its run."""
        ends = self._end[row : run_ends[row]]
        return row + max(1, int(np.searchsorted(ends, self._position[row] + most, "right")))


def _run_ends(joins_next: _Mask) -> Numbers:
    """Return for each row the end of its run, given whether each but the last joins the next one."""
    ends = np.append(np.flatnonzero(~joins_next), len(joins_next)) + 1
    return ends[np.searchsorted(ends, np.arange(len(joins_next) + 1), "right")]
