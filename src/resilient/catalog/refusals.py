"""How a commit is refused: in words that name item, tensor and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final, Protocol

from resilient.errors import ConflictError, ErrorKind
from resilient.format.box import Box

DECLARE: Final = (
    "nothing is merged silently: declare the item per_rank, or each part of the tensor with "
    "resilient.Shard(tensor, name, global_shape, offset)"
)


class Leaf(Protocol):
    """A tensor or a value."""

    @property
    def item(self) -> str: ...
    @property
    def name(self) -> str: ...


def divergent(title: str, ranks: Sequence[int], how: str) -> ConflictError:
    """Return the error for what ranks describe differently; the last of them is the one that differs."""
    return ConflictError(f"{title} {how} on {in_words(ranks)}", kind=ErrorKind.DIVERGENT, hint=DECLARE, rank=ranks[-1])


def title(leaf: Leaf, rank: int | None) -> str:
    """Return a tensor or value of a rank (None: it is not per rank) as an error names it."""
    return f"item {leaf.item!r}, {leaf.name!r}" + ("" if rank is None else f" of rank {rank}")


def at(box: Box) -> str:
    """Return a box as a slice: ``[0:4, 2:3]``."""
    return "[" + ", ".join(f"{start}:{end}" for start, end in zip(box.offset, box.end, strict=True)) + "]"


def in_words(ranks: Iterable[int]) -> str:
    """Return ranks in words, runs of them shortened: ``ranks 0-3, 7``."""
    ordered = sorted(set(ranks))
    if not ordered:
        return "no rank"
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])]
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank {parts[0]}" if len(ordered) == 1 else f"ranks {', '.join(parts)}"
