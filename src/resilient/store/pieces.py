"""Buffers that lie back to back, cut anew into pieces of a given size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from resilient.format.digest import BytesLike


def total(parts: Sequence[BytesLike]) -> int:
    """Return the number of bytes in all parts."""
    return sum(memoryview(part).nbytes for part in parts)


def pieces(parts: Sequence[BytesLike], nbytes: int) -> Iterator[bytes]:
    """Yield the content of ``parts`` in pieces of ``nbytes`` (the last may be shorter), holding one piece at a time."""
    piece = bytearray()
    for part in parts:
        rest = memoryview(part).cast("B")
        while rest.nbytes:
            taken = rest[: nbytes - len(piece)]
            piece += taken
            rest = rest[taken.nbytes :]
            if len(piece) == nbytes:
                yield bytes(piece)
                piece = bytearray()
    if piece:
        yield bytes(piece)
