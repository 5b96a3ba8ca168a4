"""Why the chunks of one tensor do not cover it once: looked at box by box, for the error that says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from resilient.catalog.refusals import DECLARE, at, divergent, in_words, title
from resilient.errors import ConflictError, ErrorKind
from resilient.format.box import Box, intersect, overlaps, uncovered
from resilient.format.chunks import NOT_HERE, Chunk
from resilient.format.documents import Tensor


@dataclass(slots=True)
class _Piece:
    """A box of a tensor: who holds it, whether one of them stores it, and the digests they give."""

    ranks: list[int] = field(default_factory=list)
    digests: set[bytes] = field(default_factory=set)
    stored: bool = False


_Pieces: TypeAlias = dict[Box, _Piece]


def why_wrong(tensor: Tensor, chunks: Iterable[Chunk], ranks: Sequence[int]) -> ConflictError | None:
    """Return what is wrong with a tensor, given all chunks of it and the rank that lists each; None if nothing is."""
    pieces: _Pieces = {}
    for chunk, rank in zip(chunks, ranks, strict=True):
        piece = pieces.setdefault(chunk.box, _Piece())
        piece.ranks.append(rank)
        piece.digests.update([chunk.digest] if chunk.digest else [])
        piece.stored = piece.stored or chunk.object != NOT_HERE
    for piece in pieces.values():
        if len(piece.digests) > 1:
            return divergent(title(tensor, tensor.rank), piece.ranks, "has different values")
    stored = [box for box, piece in pieces.items() if piece.stored and box.volume]
    clash = overlaps(stored) or _crossing(pieces, stored)
    if clash is not None:
        return _overlap(tensor, clash, _holders(pieces[box] for box in clash))
    hole = uncovered(tensor.shape, stored)
    return _hole(tensor, hole, _holders(pieces.values())) if hole else None


def _crossing(pieces: _Pieces, stored: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return a box that is only held and a stored one that lies partly in it.

    What is only held must be made of whole chunks, or its values were compared with nothing that is stored.
    """
    for held in pieces.keys() - set(stored):
        crossing = next((box for box in stored if intersect(box, held) not in (None, box)), None)
        if crossing is not None:
            return held, crossing
    return None


def _overlap(tensor: Tensor, clash: tuple[Box, Box], ranks: Sequence[int]) -> ConflictError:
    one, two = clash
    return ConflictError(
        f"{title(tensor, tensor.rank)}: parts overlap without being equal, at {at(one)} and {at(two)} on "
        f"{in_words(ranks)}",
        kind=ErrorKind.DIVERGENT,
        hint=DECLARE,
        rank=ranks[0],
    )


def _hole(tensor: Tensor, elements: int, ranks: Sequence[int]) -> ConflictError:
    return ConflictError(
        f"{title(tensor, tensor.rank)}: {elements} of its elements are not stored (held: {in_words(ranks)})",
        kind=ErrorKind.INCOMPLETE,
        hint="every part of a tensor must be saved by some rank; parts are declared with resilient.Shard",
    )


def _holders(pieces: Iterable[_Piece]) -> list[int]:
    return sorted({rank for piece in pieces for rank in piece.ranks})
