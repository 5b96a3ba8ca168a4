"""Which bytes the data objects of a save hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from resilient.format.codec import BYTE_GROUPED_ZSTD, RAW, encode
from resilient.format.digest import BytesLike
from resilient.writer.outline import Outline

Pieces = npt.NDArray[np.int64]
"""Numbers of pieces of an outline, ascending."""

_ENCODED_AT_ONCE: Final = 64 << 20
"""Bytes that are compressed into one object: so much is held in memory, twice, while the one before is sent."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """The content of one data object: ``pieces`` back to back, stored in so many bytes with such a codec each."""

    pieces: Pieces
    parts: Sequence[BytesLike]
    nbytes: npt.NDArray[np.int64]
    codec: npt.NDArray[np.uint8]


def as_staged(outline: Outline, payload: memoryview, pieces: Pieces) -> Iterator[Load]:
    """Yield objects that hold pieces as they lie in the slot; what lies back to back there is one part."""
    object_of = outline.object[pieces]
    for number in np.unique(object_of).tolist():
        chosen = pieces[object_of == number]
        yield Load(
            pieces=chosen,
            parts=list(_ranges(outline, payload, chosen)),
            nbytes=outline.nbytes[chosen],
            codec=np.full(len(chosen), RAW, np.uint8),
        )


def encoded(outline: Outline, payload: memoryview, pieces: Pieces, level: int) -> Iterator[Load]:
    """Yield objects that hold pieces compressed, but for those that do not shrink; the next one is made meanwhile."""
    with ThreadPoolExecutor(1, thread_name_prefix="resilient-encode") as pool:
        jobs = [_job(outline, payload, chosen, level) for chosen in _cut(outline, pieces)]
        ahead = [pool.submit(job) for job in jobs[:1]]
        for job in [*jobs[1:], None]:
            load = ahead.pop().result()
            if job is not None:
                ahead.append(pool.submit(job))
            yield load


def _ranges(outline: Outline, payload: memoryview, pieces: Pieces) -> Iterator[memoryview]:
    begin = outline.at[pieces]
    end = begin + outline.nbytes[pieces]
    apart = np.flatnonzero(begin[1:] != end[:-1])
    first, last = np.concatenate([[0], apart + 1]), np.concatenate([apart, [len(pieces) - 1]])
    for one, other in zip(begin[first].tolist(), end[last].tolist(), strict=True):
        yield payload[one:other]


def _cut(outline: Outline, pieces: Pieces) -> Iterator[Pieces]:
    total = np.cumsum(outline.nbytes[pieces])
    begin = 0
    while begin < len(pieces):
        before = int(total[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(total, before + _ENCODED_AT_ONCE, "right")))
        yield pieces[begin:end]
        begin = end


def _job(outline: Outline, payload: memoryview, pieces: Pieces, level: int) -> Callable[[], Load]:
    def make() -> Load:
        parts: list[BytesLike] = []
        codec = np.full(len(pieces), RAW, np.uint8)
        for row, (piece, itemsize) in enumerate(zip(pieces.tolist(), outline.itemsize[pieces].tolist(), strict=True)):
            raw = outline.raw(payload, piece)
            short = encode(raw, itemsize, level)
            parts.append(raw if short is None else short)
            codec[row] = RAW if short is None else BYTE_GROUPED_ZSTD
        return Load(pieces=pieces, parts=parts, nbytes=np.array(list(map(len, parts)), np.int64), codec=codec)

    return make
