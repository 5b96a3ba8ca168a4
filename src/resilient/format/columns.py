"""How tables of chunks become bytes: columns of the narrowest integers that hold them, and digests as they are."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from resilient.errors import CorruptError, ErrorKind
from resilient.format.chunks import Boxes, Chunks, Column, Places
from resilient.format.digest import NBYTES

_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "u1": np.dtype("<u1"),
    "u2": np.dtype("<u2"),
    "i4": np.dtype("<i4"),
    "i8": np.dtype("<i8"),
}
_LIMITS: Final = {name: (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)) for name, dtype in _DTYPES.items()}
_LEVEL: Final = 1
"""Of compression. What compresses well here does so at any level, and a committer waits for it."""
MAX_NBYTES: Final = 4 << 30
UNDECODABLE: Final = (ValueError, LookupError, OverflowError, MemoryError, msgspec.MsgspecError, zstandard.ZstdError)
"""What decoding raises for bytes that are not what they should be."""

_Packed: TypeAlias = list[tuple[str, bytes]]
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Packed)


_MAX_KEY: Final = 1 << 62


def distinct(rows: Column) -> tuple[Column, Column]:
    """Return where each distinct row of whole numbers is first, and which of them each row is; in the order of rows.

    What ``np.unique(rows, axis=0, return_index=True, return_inverse=True)`` finds by comparing rows as bytes, which
    takes a microsecond for each: here a row becomes one number.
    """
    key, keys = np.zeros(len(rows), np.int64), 1
    for column in rows.T.astype(np.int64) if len(rows) else ():
        lowest, extent = int(column.min()), int(column.max()) - int(column.min()) + 1
        if keys * extent > _MAX_KEY:
            found, key = np.unique(key, return_inverse=True)
            keys = len(found)
        if keys * extent > _MAX_KEY:
            found, column = np.unique(column, return_inverse=True)  # noqa: PLW2901 -- the same column, numbered
            lowest, extent = 0, len(found)
        key, keys = key * extent + (column - lowest), keys * extent
    if keys <= 1:  # all alike, as tensors mostly are
        return np.zeros(min(len(rows), 1), np.int64), np.zeros(len(rows), np.int64)
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return first, which


class Table(msgspec.Struct, array_like=True, frozen=True):
    """A table of chunks as it is stored: ``boxes`` and ``places`` are blocks of columns.

    ``digests`` are those of the rows that have one, back to back. They do not compress, and are not tried.
    """

    rows: int
    boxes: bytes
    places: bytes
    digests: bytes


def pack_table(chunks: Chunks) -> Table:
    """Return a table as it is stored."""
    return join_table(pack_boxes(chunks.boxes), chunks.places)


def join_table(boxes: bytes, places: Places) -> Table:
    """Return a table as it is stored, of boxes that are packed already (they are the same at the next save)."""
    digests = places.digest if places.digested.all() else places.digest[places.digested]
    return Table(
        rows=len(places), boxes=boxes, places=_pack_places(places), digests=np.ascontiguousarray(digests).tobytes()
    )


def unpack_table(table: Table) -> Chunks:
    """Return a stored table.

    Raises:
        One of `UNDECODABLE`: it is not one.
    """
    return unpack_tables([table])


def unpack_tables(tables: Sequence[Table]) -> Chunks:
    """Return stored tables (one at least) as one, in their order.

    Together, because the calls that a small table takes one by one take hardly longer for a hundred of them.

    Raises:
        One of `UNDECODABLE`: one of them is none.
    """
    rows = [table.rows for table in tables]
    return Chunks(unpack_boxes([table.boxes for table in tables], rows), _unpack_places(tables, rows))


def pack_boxes(boxes: Boxes) -> bytes:
    """Return the block of the columns ``tensor`` (differences), ``ndim``, and each dimension's ``offset``, ``size``."""
    dimensions = [column[:, axis] for axis in range(boxes.offset.shape[1]) for column in (boxes.offset, boxes.size)]
    return pack_columns([_differences(boxes.tensor), boxes.ndim, *dimensions])


def unpack_boxes(blocks: Sequence[bytes], rows: Sequence[int]) -> Boxes:
    """Return the boxes of some blocks (one at least) as one table; ``rows`` are those of each."""
    found = [unpack_columns(block, count) for block, count in zip(blocks, rows, strict=True)]
    if any(len(columns) % 2 for columns in found):
        raise ValueError("boxes without a size")
    widest = max(map(len, found))
    wide = any(column.itemsize > np.dtype(np.int32).itemsize for _, _, *rest in found for column in rest)
    given = np.repeat([len(columns) // 2 - 1 for columns in found], rows)
    for columns, count in zip(found, rows, strict=True):
        columns.extend([np.zeros(count, np.uint8), np.ones(count, np.uint8)] * ((widest - len(columns)) // 2))
    tensor, ndim, *dimensions = _joined(found)
    if (ndim > given).any():
        raise ValueError("boxes with other dimensions than they say")
    dtype = np.int64 if wide else np.int32
    offset, size = (_beside(part, len(tensor), dtype) for part in (dimensions[::2], dimensions[1::2]))
    if (ndim != offset.shape[1]).any():
        filling = np.arange(offset.shape[1]) >= ndim[:, None]
        offset[filling], size[filling] = 0, 1
    return Boxes(tensor=_sums(tensor, rows, np.int32), ndim=ndim.astype(np.uint8), offset=offset, size=size)


def _pack_places(places: Places) -> bytes:
    """Return the block of the columns ``object``, ``start`` (differences), ``nbytes``, ``codec``, ``digested``."""
    return pack_columns(
        [_differences(places.object), _differences(places.start), places.nbytes, places.codec, places.digested]
    )


def _unpack_places(tables: Sequence[Table], rows: Sequence[int]) -> Places:
    found = [unpack_columns(table.places, table.rows) for table in tables]
    for columns, table in zip(found, tables, strict=True):
        if len(table.digests) != NBYTES * np.count_nonzero(columns[-1]):
            raise ValueError("more or fewer digests than rows that have one")
    object_, start, nbytes, codec, known = _joined(found)
    digested = known.astype(np.bool_)
    digest = np.frombuffer(b"".join([table.digests for table in tables]), np.uint8).reshape(-1, NBYTES)
    if not digested.all():
        given, digest = digest, np.zeros((len(digested), NBYTES), np.uint8)
        digest[digested] = given
    return Places(
        object=_sums(object_, rows, np.int32),
        start=_sums(start, rows, np.int64),
        nbytes=nbytes,
        codec=codec.astype(np.uint8),
        digest=digest,
        digested=digested,
    )


def pack_columns(columns: Sequence[Column]) -> bytes:
    """Return columns of integers as one compressed block, each in the narrowest type that holds it."""
    return compress(_encoder.encode([_narrow(column) for column in columns]))


def unpack_columns(block: bytes, rows: int) -> list[Column]:
    """Return the columns of a block, each of so many rows."""
    columns = [np.frombuffer(data, _DTYPES[dtype]) for dtype, data in _decoder.decode(decompress(block))]
    if any(len(column) != rows for column in columns):
        raise ValueError("columns of different lengths")
    return columns


def compress(data: bytes) -> bytes:
    """Return one zstd frame."""
    return _contexts.compressor.compress(data)


def decompress(data: bytes) -> bytes:
    """Return what a zstd frame holds, unless it claims to be larger than any document."""
    return _contexts.decompressor.decompress(data, max_output_size=MAX_NBYTES)


class _Contexts(threading.local):
    """What zstd works in: making it takes longer than a small block, and threads must not share it."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts: Final = _Contexts()


def malformed(where: str, error: BaseException) -> CorruptError:
    """Return the error that says that a document does not decode."""
    return CorruptError(f"{where} does not decode: {error}", kind=ErrorKind.MALFORMED)


def _narrow(column: Column) -> tuple[str, bytes]:
    if column.dtype in {np.dtype(np.uint8), np.dtype(np.bool_)}:
        return "u1", column.tobytes()
    low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    name = next(name for name, (least, most) in _LIMITS.items() if least <= low and high <= most)
    return name, column.astype(_DTYPES[name]).tobytes()


def _differences(column: Column) -> Column:
    """Return by how much each row is more than the one before: counters become constants, which compress."""
    differences = column.astype(np.int64)
    differences[1:] -= column[:-1]
    return differences


def _joined(tables: Sequence[Sequence[Column]]) -> list[npt.NDArray[np.int64]]:
    """Return the columns of several tables (one at least) as those of one."""
    return [np.concatenate(parts, dtype=np.int64) for parts in zip(*tables, strict=True)]


def _sums(column: npt.NDArray[np.int64], rows: Sequence[int], dtype: type[np.signedinteger]) -> Column:
    """Undo `_differences`, which begin anew in each of some tables."""
    total = np.concatenate([[0], np.cumsum(column)])
    begins = np.cumsum(rows) - rows
    numbers = total[1:] - np.repeat(total[begins], rows)
    narrow: Column = numbers.astype(dtype, copy=False)
    if (narrow != numbers).any():
        raise ValueError("numbers beyond what they number")
    return narrow


def _beside(columns: Sequence[Column], rows: int, dtype: type[np.signedinteger]) -> Column:
    table = np.empty((rows, len(columns)), dtype)
    for axis, column in enumerate(columns):
        table[:, axis] = column
    return table
