"""What is stored of which tensor where, as a table: a checkpoint may have tens of millions of chunks.

A table behaves as a sequence of `Chunk`. Its columns are for those who look at many rows: `Boxes` says which part of
which tensor each row is, `Places` where it lies. The two are apart because the first is the same at every save.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, SupportsIndex, TypeAlias, overload

import msgspec
import numpy as np
import numpy.typing as npt

from resilient.format.box import Box
from resilient.format.digest import NBYTES

NOT_HERE: Final = -1
_PAIRS_AT_ONCE: Final = 1 << 20
_MAX_KEY: Final = 1 << 62

Column: TypeAlias = npt.NDArray[Any]
Rows: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.bool_] | slice


class Chunk(msgspec.Struct, array_like=True, frozen=True):
    """A box of a tensor, as contiguous row-major bytes.

    ``nbytes`` is the length of the stored range; ``codec`` says how it decodes (0: the bytes themselves). ``digest`` is
    that of the decoded bytes.
    In a receipt ``tensor`` and ``object`` index the receipt's own lists; ``object`` is `NOT_HERE` for a box that this
    rank holds and another rank stores, and ``digest`` is then empty where it was not computed.
    """

    tensor: int
    offset: tuple[int, ...]
    size: tuple[int, ...]
    object: int
    start: int
    nbytes: int
    digest: bytes
    codec: int = 0

    @property
    def box(self) -> Box:
        return Box(self.offset, self.size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Boxes:
    """Which part of which tensor each row is.

    ``tensor`` (int32) is its number and ``ndim`` (uint8) how many dimensions it has. ``offset`` and ``size`` have as
    many columns as the widest row; narrower ones are filled up with dimensions of one element (offset 0, size 1), so
    that volumes and intersections need not tell them apart. They are int64, or int32 where every end fits: use `end`
    and `volume`, or widen them, before calculating.
    """

    tensor: Column
    ndim: Column
    offset: Column
    size: Column

    def __len__(self) -> int:
        return len(self.tensor)

    @classmethod
    def of(cls, tensors: Sequence[int], boxes: Sequence[Box]) -> Boxes:
        """Return the table of these boxes of these tensors."""
        ndim = np.array([len(box.offset) for box in boxes], np.uint8)
        width = int(ndim.max(initial=0))
        tensor = np.array(tensors, np.int32)
        if (ndim == width).all():  # the usual case, and ten times faster
            offset = _flat(box.offset for box in boxes).reshape(len(boxes), width)
            size = _flat(box.size for box in boxes).reshape(len(boxes), width)
            return cls(tensor=tensor, ndim=ndim, offset=offset, size=size)
        offset = np.zeros((len(boxes), width), np.int64)
        size = np.ones((len(boxes), width), np.int64)
        for row, box in enumerate(boxes):
            offset[row, : ndim[row]] = box.offset
            size[row, : ndim[row]] = box.size
        return cls(tensor=tensor, ndim=ndim, offset=offset, size=size)

    @classmethod
    def joined(cls, tables: Sequence[Boxes]) -> Boxes:
        """Return the rows of several tables (one at least), in their order."""
        width = max(each.offset.shape[1] for each in tables)
        return cls(
            tensor=np.concatenate([each.tensor for each in tables]),
            ndim=np.concatenate([each.ndim for each in tables]),
            offset=np.concatenate([widened(each.offset, width, 0) for each in tables]),
            size=np.concatenate([widened(each.size, width, 1) for each in tables]),
        )

    def take(self, rows: Rows) -> Boxes:
        """Return some rows."""
        return Boxes(tensor=self.tensor[rows], ndim=self.ndim[rows], offset=self.offset[rows], size=self.size[rows])

    def box(self, row: int) -> Box:
        ndim = int(self.ndim[row])
        return Box(tuple(self.offset[row, :ndim].tolist()), tuple(self.size[row, :ndim].tolist()))

    @property
    def end(self) -> npt.NDArray[np.int64]:
        """The first element of each dimension that is not in the box any more."""
        return np.add(self.offset, self.size, dtype=np.int64)

    @property
    def volume(self) -> npt.NDArray[np.int64]:
        """The number of elements of each row."""
        # Column by column: reductions over rows of two numbers are several times slower.
        volume = np.ones(len(self), np.int64)
        for axis in range(self.size.shape[1]):
            volume *= self.size[:, axis]
        return volume

    @property
    def empty(self) -> npt.NDArray[np.bool_]:
        """Whether each row has no element."""
        found = np.zeros(len(self), bool)
        for axis in range(self.size.shape[1]):
            found |= self.size[:, axis] == 0
        return found

    def meeting(self, wanted: Boxes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the pairs of a row here and a row of ``wanted`` that share an element: row numbers, side by side.

        The pairs come in the order of ``wanted``. Takes time for each row of a wanted tensor that meets in the first
        dimension, if rows come by tensor and offset; else they are sorted first.
        """
        first, count, order = self._near(wanted)
        mine, theirs = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for begin, end in _portions(count):
            which = np.repeat(np.arange(begin, end), count[begin:end])
            # The k-th pair of a wanted box is with the k-th row of its tensor.
            within = np.arange(len(which)) - np.repeat(np.cumsum(count[begin:end]) - count[begin:end], count[begin:end])
            rows = first[which] + within
            rows = rows if order is None else order[rows]
            kept = self._meets(rows, wanted, which)
            mine.append(rows[kept])
            theirs.append(which[kept])
        return np.concatenate(mine), np.concatenate(theirs)

    def _near(self, wanted: Boxes) -> tuple[Column, Column, Column | None]:
        """Return, for each wanted row, the first row that may meet it and how many; and in which order rows count."""
        mine, theirs = _extent(self), _extent(wanted)
        span = max(int(mine[1].max(initial=0)), int(theirs[1].max(initial=0))) + 1
        numbers = max(int(self.tensor.max(initial=0)), int(wanted.tensor.max(initial=0))) + 1
        if numbers * span > _MAX_KEY:
            mine = theirs = (np.zeros(1, np.int64), np.ones(1, np.int64))
            span = 2
        low, end = (self.tensor.astype(np.int64) * span + each for each in mine)
        order = None if (low[1:] >= low[:-1]).all() else np.argsort(low, kind="stable")
        if order is not None:
            low, end = low[order], end[order]
        base = wanted.tensor.astype(np.int64) * span
        first = np.searchsorted(np.maximum.accumulate(end), base + theirs[0], "right")
        last = np.searchsorted(low, base + theirs[1], "left")
        return first, np.maximum(last - first, 0), order

    def _meets(self, rows: Column, wanted: Boxes, which: Column) -> npt.NDArray[np.bool_]:
        kept = np.ones(len(rows), bool)
        for axis in range(min(self.offset.shape[1], wanted.offset.shape[1])):
            low = np.maximum(self.offset[rows, axis], wanted.offset[which, axis])
            end = np.add(self.offset[rows, axis], self.size[rows, axis], dtype=np.int64)
            kept &= low < np.minimum(end, np.add(wanted.offset[which, axis], wanted.size[which, axis], dtype=np.int64))
        # A scalar has no dimension, and an empty box of another width may have its empty one beyond the common ones.
        return kept & ~self.empty[rows] & ~wanted.empty[which]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """Where each row lies.

    ``object`` (int32), ``start`` and ``nbytes`` (int64), ``codec`` (uint8) are those of `Chunk`; ``digest`` has 16
    columns of uint8, which count only where ``digested``.
    """

    object: Column
    start: Column
    nbytes: Column
    codec: Column
    digest: Column
    digested: Column

    def __len__(self) -> int:
        return len(self.object)

    @classmethod
    def joined(cls, tables: Sequence[Places]) -> Places:
        """Return the rows of several tables (one at least), in their order."""
        names = ("object", "start", "nbytes", "codec", "digest", "digested")
        return cls(**{name: np.concatenate([getattr(each, name) for each in tables]) for name in names})

    def take(self, rows: Rows) -> Places:
        """Return some rows."""
        return Places(
            object=self.object[rows],
            start=self.start[rows],
            nbytes=self.nbytes[rows],
            codec=self.codec[rows],
            digest=self.digest[rows],
            digested=self.digested[rows],
        )


class Chunks(Sequence[Chunk]):
    """A table of chunks: immutable, a sequence of `Chunk`, with its columns in ``boxes`` and ``places``."""

    __slots__ = ("boxes", "places")

    def __init__(self, boxes: Boxes, places: Places) -> None:
        assert len(boxes) == len(places), "columns of one table are equally long"
        self.boxes = boxes
        self.places = places

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> Chunks:
        """Return the table of these chunks.

        Raises:
            ValueError: a digest is neither empty nor one.
        """
        rows = list(chunks)
        digested = np.array([bool(row.digest) for row in rows], bool)
        digests = b"".join(row.digest or bytes(NBYTES) for row in rows)
        if any(len(row.digest) not in (0, NBYTES) for row in rows):
            raise ValueError(f"a digest has {NBYTES} bytes")
        return cls(
            Boxes.of([row.tensor for row in rows], [row.box for row in rows]),
            Places(
                object=np.array([row.object for row in rows], np.int32),
                start=np.array([row.start for row in rows], np.int64),
                nbytes=np.array([row.nbytes for row in rows], np.int64),
                codec=np.array([row.codec for row in rows], np.uint8),
                digest=np.frombuffer(digests, np.uint8).reshape(-1, NBYTES),
                digested=digested,
            ),
        )

    @classmethod
    def joined(cls, tables: Sequence[Chunks]) -> Chunks:
        """Return the rows of several tables, in their order."""
        if not tables:
            return cls.of(())
        return cls(Boxes.joined([each.boxes for each in tables]), Places.joined([each.places for each in tables]))

    def take(self, rows: Rows) -> Chunks:
        """Return some rows: by number, by a mask, or a range."""
        return Chunks(self.boxes.take(rows), self.places.take(rows))

    def overlapping(self, wanted: Boxes) -> Chunks:
        """Return the rows that share an element with any of these boxes, in the order of the table."""
        rows, _ = self.boxes.meeting(wanted)
        met = np.zeros(len(self), np.bool_)  # np.unique would sort, or hash: fifty times slower
        met[rows] = True
        return self.take(met)

    def __len__(self) -> int:
        return len(self.boxes)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> Chunks: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Chunk | Chunks:
        if isinstance(index, slice):
            return self.take(index)
        row = range(len(self))[operator.index(index)]
        return next(self._rows(slice(row, row + 1)))

    def __iter__(self) -> Iterator[Chunk]:
        for begin in range(0, len(self), _PAIRS_AT_ONCE):
            yield from self._rows(slice(begin, begin + _PAIRS_AT_ONCE))

    def _rows(self, part: slice) -> Iterator[Chunk]:
        boxes, places = self.boxes.take(part), self.places.take(part)
        ndims = boxes.ndim.tolist()
        digests = np.ascontiguousarray(places.digest).tobytes()
        columns = (places.object, places.start, places.nbytes, places.digested, places.codec)
        offsets, sizes = boxes.offset.tolist(), boxes.size.tolist()
        for row, (tensor, object_, start, nbytes, digested, codec) in enumerate(
            zip(boxes.tensor.tolist(), *(column.tolist() for column in columns), strict=True)
        ):
            yield Chunk(
                tensor=tensor,
                offset=tuple(offsets[row][: ndims[row]]),
                size=tuple(sizes[row][: ndims[row]]),
                object=object_,
                start=start,
                nbytes=nbytes,
                digest=digests[row * NBYTES : (row + 1) * NBYTES] if digested else b"",
                codec=codec,
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Chunks):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} chunks>"


def _flat(numbers: Iterable[tuple[int, ...]]) -> Column:
    # An array of tuples takes several times as long.
    return np.fromiter(itertools.chain.from_iterable(numbers), np.int64)


def _extent(boxes: Boxes) -> tuple[Column, Column]:
    """Return where each row begins and ends in its first dimension; a scalar has one element."""
    if boxes.offset.shape[1]:
        return boxes.offset[:, 0].astype(np.int64), boxes.offset[:, 0] + boxes.size[:, 0].astype(np.int64)
    return np.zeros(len(boxes), np.int64), np.ones(len(boxes), np.int64)


def widened(column: Column, width: int, filling: int) -> Column:
    """Return offsets or sizes with so many columns."""
    missing = width - column.shape[1]
    return column if missing <= 0 else np.pad(column, ((0, 0), (0, missing)), constant_values=filling)


def _portions(count: Column) -> Iterator[tuple[int, int]]:
    """Cut a list of counts into stretches of bounded sum (of one, where a single count is beyond that)."""
    total = np.cumsum(count)
    begin = 0
    while begin < len(count):
        before = int(total[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(total, before + _PAIRS_AT_ONCE, "right")))
        yield begin, end
        begin = end
