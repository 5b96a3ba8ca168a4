"""How the bytes of a chunk are stored: as they are, or byte-grouped and compressed.

Of trained floating-point numbers only the byte with sign and exponent compresses; the mantissa is noise. Byte grouping
puts the first bytes of all elements together, then the second ones, and so on: each group, a plane, is then stored as
it is or as a zstd frame, whichever is shorter. The layout is in docs/spec/format.md, "Codecs".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from resilient.errors import CorruptError, ErrorKind

RAW: Final = 0
BYTE_GROUPED_ZSTD: Final = 1

_Bytes = npt.NDArray[np.uint8]
_Words = npt.NDArray[Any]

_LEAST_NBYTES: Final = 4 << 10
_WORTHWHILE: Final = 0.97
"""The largest share of the raw length that is worth decoding on the way back."""

_LOWEST: Final = 1
_MAX_WIDTH: Final = 8
_WORDS: Final[dict[int, np.dtype[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_BLOCK: Final = 32 << 10
"""Elements taken apart at once: the block and its words stay in the cache."""

_SAMPLE_NBYTES: Final = 64 << 10
_PLANE: Final = struct.Struct("<BQ")
_STORED, _ZSTD = 0, 1


def encode(raw: memoryview, itemsize: int, level: int) -> bytes | None:
    """Return the bytes to store with codec `BYTE_GROUPED_ZSTD`; None if that saves less than three percent.

    Args:
        raw: the bytes of a chunk.
        itemsize: of the chunk's dtype.
        level: of zstd; 1 finds nearly all that there is to find.
    """
    if raw.nbytes < _LEAST_NBYTES:
        return None
    width = _width(itemsize)
    count = raw.nbytes // width
    compressor = _compressor(level)
    # One pass over a sample decides which planes to try: what is noise costs nothing more.
    sample = _sample(raw, width)
    tried = [len(compressor.compress(plane)) <= _WORTHWHILE * plane.nbytes for plane in _planes(sample, width)]
    if not any(tried):
        return None
    planes = list(_planes(raw[: count * width], width))
    bodies = [_shorter(compressor, plane) if try_it else plane for plane, try_it in zip(planes, tried, strict=True)]
    header = b"".join(
        _PLANE.pack(_STORED if body is plane else _ZSTD, len(body)) for body, plane in zip(bodies, planes, strict=True)
    )
    stored = b"".join((bytes((width,)), header, *bodies, raw[count * width :]))
    return stored if len(stored) <= _WORTHWHILE * raw.nbytes else None


def decode(codec: int, stored: memoryview, into: memoryview, itemsize: int) -> None:
    """Fill ``into`` with the bytes that ``stored`` stands for; the digest of the chunk says whether they are right.

    Whatever ``stored`` holds: beside ``into`` no more memory is used than it takes, and nothing is written beyond it.

    Args:
        codec: of the chunk.
        stored: all of its stored bytes.
        into: writable, as long as the box of the chunk.
        itemsize: of the chunk's dtype.

    Raises:
        CorruptError: the codec is unknown, or ``stored`` does not stand for so many bytes. ``into`` holds anything.
    """
    if codec == RAW:
        if stored.nbytes != into.nbytes:
            raise _malformed(f"has {stored.nbytes} bytes instead of {into.nbytes}")
        into[:] = stored
    elif codec == BYTE_GROUPED_ZSTD:
        _decode_grouped(stored, into, itemsize)
    else:
        raise CorruptError(
            f"has codec {codec}, which this version does not know",
            kind=ErrorKind.NEWER_FORMAT,
            hint="install a newer version of resilient-torch",
        )


def _decode_grouped(stored: memoryview, into: memoryview, itemsize: int) -> None:
    width = _width(itemsize)
    body = 1 + width * _PLANE.size
    if stored.nbytes < body or stored[0] != width:
        raise _malformed(f"has no planes of elements of {width} bytes")
    entries = list(_PLANE.iter_unpack(stored[1:body]))
    count, tail = divmod(into.nbytes, width)
    if body + sum(length for _, length in entries) + tail != stored.nbytes:
        raise _malformed("has planes of another length than it says")
    planes: list[_Bytes] = []
    for method, length in entries:
        planes.append(_plane(method, stored[body : body + length], count))
        body += length
    _join(planes, np.frombuffer(into[: count * width], np.uint8))
    into[count * width :] = stored[body:]


def _plane(method: int, body: memoryview, count: int) -> _Bytes:
    """Return the ``count`` bytes of a plane."""
    if method == _ZSTD:
        try:
            # Looked at first: the decoder would trust the frame and allocate whatever it claims.
            claimed = zstandard.get_frame_parameters(body).content_size
            if claimed != count:
                raise _malformed(f"has a plane of {claimed} bytes instead of {count}")
            decoded = zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
        except (zstandard.ZstdError, MemoryError) as error:
            raise _malformed(f"does not decompress: {error}") from error
        return np.frombuffer(decoded, np.uint8)
    if method != _STORED or body.nbytes != count:
        raise _malformed(f"has a plane of {body.nbytes} bytes instead of {count}")
    return np.frombuffer(body, np.uint8)


def _compressor(level: int) -> zstandard.ZstdCompressor:
    """Return a compressor; the lowest level is tuned to planes, in which hardly anything repeats.

    There only the entropy coder gains. Looking for long matches alone, in a table that fits into a few cache lines,
    makes weights a little smaller than level 1 as it comes does, in a third of the time.
    """
    if level > _LOWEST:
        return zstandard.ZstdCompressor(level=level)
    parameters = zstandard.ZstdCompressionParameters.from_level(
        _LOWEST, strategy=zstandard.STRATEGY_FAST, target_length=0, min_match=7, hash_log=6, window_log=17
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def _shorter(compressor: zstandard.ZstdCompressor, plane: memoryview) -> bytes | memoryview:
    packed = compressor.compress(plane)
    return packed if len(packed) < plane.nbytes else plane


def _width(itemsize: int) -> int:
    """Return how many planes there are: those of the two halves of a complex128 fall together."""
    return min(itemsize, _MAX_WIDTH)


def _sample(raw: memoryview, width: int) -> memoryview:
    """Return elements from the middle of a chunk."""
    count = raw.nbytes // width
    taken = min(count, _SAMPLE_NBYTES)
    start = (count - taken) // 2
    return raw[start * width : (start + taken) * width]


def _planes(raw: memoryview, width: int) -> Iterator[memoryview]:
    """Yield the planes of a whole number of elements, the least significant first."""
    if width not in _WORDS:
        bytes_ = np.frombuffer(raw, np.uint8).reshape(-1, width)
        yield from (np.ascontiguousarray(bytes_[:, number]).data for number in range(width))
        return
    words = np.frombuffer(raw, _WORDS[width])
    planes = [np.empty(len(words), np.uint8) for _ in range(width)]
    # Shifting and narrowing whole words is several times as fast as picking every n-th byte.
    shifted = np.empty(min(_BLOCK, len(words)), words.dtype)
    for start in range(0, len(words), _BLOCK):
        block = words[start : start + _BLOCK]
        for number, plane in enumerate(planes):
            moved = np.right_shift(block, 8 * number, out=shifted[: len(block)])
            np.copyto(plane[start : start + len(block)], moved, casting="unsafe")
    yield from (plane.data for plane in planes)


def _join(planes: list[_Bytes], into: _Bytes) -> None:
    """Put the planes of all elements together again."""
    width = len(planes)
    if width not in _WORDS:
        elements = into.reshape(-1, width)
        for number, plane in enumerate(planes):
            elements[:, number] = plane
        return
    words: _Words = into.view(_WORDS[width])
    widened = np.empty(min(_BLOCK, len(words)), words.dtype)
    for start in range(0, len(words), _BLOCK):
        block = words[start : start + _BLOCK]
        np.copyto(block, planes[-1][start : start + len(block)])
        for plane in reversed(planes[:-1]):
            np.left_shift(block, 8, out=block)
            np.copyto(widened[: len(block)], plane[start : start + len(block)])
            np.bitwise_or(block, widened[: len(block)], out=block)


def _malformed(what: str) -> CorruptError:
    return CorruptError(what, kind=ErrorKind.MALFORMED)
