"""The merge as it was before it worked on columns: one chunk after another, for the other one to be compared with.

Slow, and plain enough to be seen to be right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, TypeAlias

from resilient.errors import ConflictError, ErrorKind
from resilient.format.box import Box, intersect, overlaps, uncovered
from resilient.format.chunks import NOT_HERE, Chunk, Chunks
from resilient.format.digest import NBYTES
from resilient.format.documents import Item, Manifest, Object, Receipt, Tensor, Value
from resilient.format.dtypes import ITEMSIZE

_DECLARE: Final = (
    "nothing is merged silently: declare the item per_rank, or each part of the tensor with "
    "resilient.Shard(tensor, name, global_shape, offset)"
)

_Name: TypeAlias = tuple[str, str, int | None]


@dataclass(slots=True)
class _Piece:
    """A box of a tensor: who holds it, the digests they give, and the copy that counts."""

    ranks: list[int] = field(default_factory=list)
    digests: set[bytes] = field(default_factory=set)
    stored: Chunk | None = None


def merge(receipts: Sequence[Receipt]) -> Manifest:
    """Return the manifest of an attempt, having proven that it is complete and free of contradictions.

    Complete: one receipt of each rank; every element of every tensor lies in a stored chunk; every per-rank item is
    there for every rank, unless it can be derived. Free of contradictions: what several ranks describe, they describe
    alike; replicas with digests have equal ones; chunks overlap only where they are equal (of those, the lowest
    rank's copy counts); a box that a rank only holds is a union of chunks. Time and memory are linear in the number
    of chunks for grids of equal boxes.

    Raises:
        ConflictError: kind ``divergent`` or ``incomplete``; it names item, tensor and ranks.
    """
    first = receipts[0]
    if [receipt.rank for receipt in receipts] != list(range(first.world_size)):
        raise ConflictError(
            f"{first.attempt}: {first.world_size} receipts are wanted, one of each rank", kind=ErrorKind.INCOMPLETE
        )
    items = _merge_items(receipts)
    tensors = _merge_tensors(receipts, items)
    objects, numbers = _merge_objects(receipts)
    pieces = _collect_pieces(receipts, {name: number for number, name in enumerate(tensors)}, numbers)
    chunks: list[Chunk] = []
    for number, tensor in enumerate(tensors.values()):
        chunks.extend(_chunks_of(tensor, tensors, pieces.get(number, {})))
    return Manifest(
        step=first.step,
        generation=first.generation,
        nonce=first.nonce,
        world_size=first.world_size,
        items=tuple(items.values()),
        tensors=tuple(tensors.values()),
        objects=tuple(objects),
        chunks=Chunks.of(chunks),
        values=_merge_values(receipts, items),
        receipts=(),
    )


def _merge_items(receipts: Sequence[Receipt]) -> dict[str, Item]:
    items: dict[str, Item] = {}
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    for receipt in receipts:
        for item in receipt.items:
            known = items.setdefault(item.name, item)
            ranks[item.name].append(receipt.rank)
            if known != item:
                raise _divergent(f"item {item.name!r}", ranks[item.name], "is described differently")
    for name, item in items.items():
        absent = sorted(set(range(len(receipts))) - set(ranks[name]))
        if item.per_rank and not item.derived and absent:
            raise ConflictError(
                f"per-rank item {name!r} is missing on {_ranks(absent)}",
                kind=ErrorKind.INCOMPLETE,
                hint="every rank must save a per-rank item",
                rank=absent[0],
            )
    return items


def _merge_tensors(receipts: Sequence[Receipt], items: dict[str, Item]) -> dict[_Name, Tensor]:
    tensors: dict[_Name, Tensor] = {}
    holder: dict[_Name, int] = {}
    for receipt in receipts:
        for tensor in receipt.tensors:
            name = (tensor.item, tensor.name, tensor.rank)
            _check_owner(tensor, receipt.rank, items)
            if tensor.dtype not in ITEMSIZE:
                message = f"{_title(tensor)} has the unknown dtype {tensor.dtype!r}"
                raise ConflictError(message, kind=ErrorKind.DIVERGENT, rank=receipt.rank)
            known = tensors.setdefault(name, tensor)
            if known is tensor:
                holder[name] = receipt.rank
            elif known != tensor:
                raise _divergent(_title(tensor), (holder[name], receipt.rank), _difference(known, tensor))
    return tensors


def _difference(known: Tensor, other: Tensor) -> str:
    if known.shape != other.shape:
        return f"has shape {list(known.shape)} and {list(other.shape)}"
    if known.dtype != other.dtype:
        return f"has dtype {known.dtype} and {other.dtype}"
    return "is described differently"


def _merge_values(receipts: Sequence[Receipt], items: dict[str, Item]) -> tuple[Value, ...]:
    values: dict[_Name, Value] = {}
    holder: dict[_Name, int] = {}
    for receipt in receipts:
        for value in receipt.values:
            name = (value.item, value.name, value.rank)
            _check_owner(value, receipt.rank, items)
            known = values.setdefault(name, value)
            if known is value:
                holder[name] = receipt.rank
            elif known != value:
                raise _divergent(_title(value), (holder[name], receipt.rank), "has different values")
    return tuple(values.values())


def _check_owner(leaf: Tensor | Value, rank: int, items: dict[str, Item]) -> None:
    item = items.get(leaf.item)
    if item is None:
        raise ConflictError(f"{_title(leaf)} belongs to no item of the receipts", kind=ErrorKind.INCOMPLETE, rank=rank)
    if leaf.rank != (rank if item.per_rank else None):
        raise ConflictError(f"{_title(leaf)} is in the receipt of rank {rank}", kind=ErrorKind.DIVERGENT, rank=rank)


def _merge_objects(receipts: Sequence[Receipt]) -> tuple[list[Object], list[list[int]]]:
    """Return all objects, and for each receipt the numbers that its objects have among them."""
    objects: list[Object] = []
    numbers: list[list[int]] = []
    for receipt in receipts:
        numbers.append(list(range(len(objects), len(objects) + len(receipt.objects))))
        objects.extend(receipt.objects)
    return objects, numbers


def _collect_pieces(
    receipts: Sequence[Receipt], tensors: dict[_Name, int], objects: list[list[int]]
) -> dict[int, dict[Box, _Piece]]:
    """Return, for each tensor, what all ranks hold of it; only sound chunks get that far."""
    pieces: defaultdict[int, dict[Box, _Piece]] = defaultdict(dict)
    for receipt, renumbered in zip(receipts, objects, strict=True):
        numbers = [tensors[tensor.item, tensor.name, tensor.rank] for tensor in receipt.tensors]
        for chunk in receipt.chunks:
            _check_chunk(receipt, chunk)
            number = numbers[chunk.tensor]
            box = chunk.box
            piece = pieces[number].get(box)
            if piece is None:
                piece = pieces[number][box] = _Piece()
            piece.ranks.append(receipt.rank)
            if chunk.digest:
                piece.digests.add(chunk.digest)
            if chunk.object != NOT_HERE and piece.stored is None:
                piece.stored = Chunk(
                    tensor=number,
                    offset=chunk.offset,
                    size=chunk.size,
                    object=renumbered[chunk.object],
                    start=chunk.start,
                    nbytes=chunk.nbytes,
                    digest=chunk.digest,
                )
    return pieces


def _check_chunk(receipt: Receipt, chunk: Chunk) -> None:
    """Refuse a chunk that cannot be true, so that no reader has to doubt what a manifest says."""
    if not 0 <= chunk.tensor < len(receipt.tensors) or not NOT_HERE <= chunk.object < len(receipt.objects):
        message = f"the receipt of rank {receipt.rank} names a tensor or an object that it does not list"
        raise ConflictError(message, kind=ErrorKind.DIVERGENT, rank=receipt.rank)
    tensor = receipt.tensors[chunk.tensor]
    box = chunk.box
    sound = box.within(tensor.shape) and chunk.nbytes == box.volume * ITEMSIZE[tensor.dtype] and tensor.alias is None
    if chunk.object != NOT_HERE:
        end = receipt.objects[chunk.object].nbytes
        sound = sound and 0 <= chunk.start <= end - chunk.nbytes and len(chunk.digest) == NBYTES
    if not sound:
        raise ConflictError(
            f"{_title(tensor)}: rank {receipt.rank} describes a part that cannot be: {chunk}",
            kind=ErrorKind.DIVERGENT,
            rank=receipt.rank,
        )


def _chunks_of(tensor: Tensor, tensors: dict[_Name, Tensor], pieces: dict[Box, _Piece]) -> list[Chunk]:
    if tensor.alias is not None:
        target = tensors.get((tensor.item, tensor.alias, tensor.rank))
        if target is None or target.alias is not None:
            raise ConflictError(
                f"{_title(tensor)} shares the storage of {tensor.alias!r}, which is not saved",
                kind=ErrorKind.INCOMPLETE,
            )
        return []
    for piece in pieces.values():
        if len(piece.digests) > 1:
            raise _divergent(_title(tensor), piece.ranks, "has different values")
    stored = {box: piece.stored for box, piece in pieces.items() if piece.stored is not None and box.volume}
    _check_overlaps(tensor, pieces, stored)
    hole = uncovered(tensor.shape, list(stored))
    if hole:
        raise ConflictError(
            f"{_title(tensor)}: {hole} of its elements are not stored (held: {_ranks(_holders(pieces.values()))})",
            kind=ErrorKind.INCOMPLETE,
            hint="every part of a tensor must be saved by some rank; parts are declared with resilient.Shard",
        )
    return [chunk for _, chunk in sorted(stored.items())]


def _check_overlaps(tensor: Tensor, pieces: dict[Box, _Piece], stored: dict[Box, Chunk]) -> None:
    clash = overlaps(list(stored))
    if clash is None:
        # What is only held must be made of whole chunks, or its values were compared with nothing that is stored.
        for held in pieces.keys() - stored.keys():
            crossing = next((box for box in stored if _crosses(box, held)), None)
            if crossing is not None:
                clash = (held, crossing)
                break
    if clash is not None:
        one, two = clash
        ranks = _holders([pieces[one], pieces[two]])
        raise ConflictError(
            f"{_title(tensor)}: parts overlap without being equal, at {_at(one)} and {_at(two)} on {_ranks(ranks)}",
            kind=ErrorKind.DIVERGENT,
            hint=_DECLARE,
            rank=ranks[0],
        )


def _crosses(box: Box, held: Box) -> bool:
    shared = intersect(box, held)
    return shared is not None and shared != box


def _divergent(title: str, ranks: Sequence[int], how: str) -> ConflictError:
    return ConflictError(f"{title} {how} on {_ranks(ranks)}", kind=ErrorKind.DIVERGENT, hint=_DECLARE, rank=ranks[-1])


def _holders(pieces: Iterable[_Piece]) -> list[int]:
    return sorted({rank for piece in pieces for rank in piece.ranks})


def _title(leaf: Tensor | Value) -> str:
    return f"item {leaf.item!r}, {leaf.name!r}" + ("" if leaf.rank is None else f" of rank {leaf.rank}")


def _at(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{end}" for start, end in zip(box.offset, box.end, strict=True)) + "]"


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words, runs of them shortened: ``ranks 0-3, 7``."""
    if not ranks:
        return "no rank"
    ordered = sorted(set(ranks))
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])]
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank {parts[0]}" if len(ordered) == 1 else f"ranks {', '.join(parts)}"
