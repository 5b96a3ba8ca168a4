"""Making a staged state durable: data objects first, then the receipt that says what they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from resilient.catalog.commit import write_receipt
from resilient.catalog.prune import give_up
from resilient.clock import Clock
from resilient.engine.stage import StagedPiece
from resilient.errors import StoreError
from resilient.format.digest import digest
from resilient.format.documents import NOT_HERE, Chunk, Object, Receipt, Tensor, Value
from resilient.format.layout import Attempt
from resilient.state.leaves import Captured
from resilient.store.base import Store

MAX_OBJECT_NBYTES: Final = 1 << 30
SMALL_NBYTES: Final = 64 << 10
"""Replicas up to this size are compared between ranks at every commit, larger ones when the structure is new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Which rank writes, as part of how many."""

    rank: int
    world_size: int


def describe_values(captured: Captured) -> tuple[Value, ...]:
    """Return the captured values as a receipt lists them."""
    return tuple(
        Value(item=leaf.item, name=leaf.name, path=leaf.path, data=leaf.data, rank=leaf.rank)
        for leaf in captured.values
    )


def persist(
    store: Store,
    attempt: Attempt,
    writer: Writer,
    captured: Captured,
    staged: Sequence[StagedPiece],
    clock: Clock,
) -> int:
    """Write what this rank stores, then its receipt; return the bytes of data written.

    Pieces that another rank stores are only listed, with a digest where they were staged, so that the commit can
    compare. If the data cannot be written, what was written of it is removed again and the attempt is given up.
    """
    tensors = describe_tensors(captured)
    numbers = {(tensor.item, tensor.name): number for number, tensor in enumerate(tensors)}
    number_of = [numbers[leaf.item, leaf.name] for leaf in captured.tensors]
    chunks: list[Chunk] = []
    objects: list[Object] = []
    groups = list(_grouped([each for each in staged if each.piece.owner in (None, writer.rank)]))
    others = [each for each in staged if each.piece.owner not in (None, writer.rank)]
    for part, group in enumerate(groups):
        start = 0
        for each in group:
            chunks.append(_chunk(each, number_of, part, start))
            start += each.piece.nbytes
        objects.append(Object(key=attempt.data(writer.rank, part), nbytes=start))
    try:
        for written, group in zip(objects, groups, strict=True):
            store.put(written.key, [each.data for each in group])
    except StoreError as error:
        if not error.retryable:  # else the store is away: nothing can be removed, and trying would take long again
            _withdraw(store, attempt, objects, clock)
        raise
    chunks.extend(_chunk(each, number_of, NOT_HERE, 0) for each in others)
    receipt = Receipt(
        step=attempt.step,
        generation=attempt.generation,
        nonce=attempt.nonce,
        rank=writer.rank,
        world_size=writer.world_size,
        items=captured.items,
        tensors=tensors,
        objects=tuple(objects),
        chunks=tuple(chunks),
        values=describe_values(captured),
    )
    write_receipt(store, receipt)
    return sum(each.nbytes for each in objects)


def _withdraw(store: Store, attempt: Attempt, objects: Sequence[Object], clock: Clock) -> None:
    """Free what a rank has written of an attempt for which it will never write a receipt, so which cannot be committed.

    The TOMBSTONE lets retention remove what the other ranks have written of it, without waiting for a restart.
    """
    with suppress(StoreError):  # the error that led here is the one to tell; a later life collects what stays
        for each in objects:
            store.delete(each.key)
        give_up(store, attempt, clock, reason="a rank could not write its data")


def describe_tensors(captured: Captured) -> tuple[Tensor, ...]:
    """Return the captured tensors as a receipt lists them: once each, in order, however many parts this rank holds."""
    tensors: dict[str, Tensor] = {}
    for leaf in captured.tensors:
        described = Tensor(leaf.item, leaf.name, leaf.path, leaf.dtype, leaf.shape, leaf.rank, leaf.alias)
        tensors.setdefault(f"{leaf.item}/{leaf.name}", described)
    return tuple(tensors.values())


def _chunk(each: StagedPiece, number_of: Sequence[int], part: int, start: int) -> Chunk:
    piece = each.piece
    # What was not copied (a large replica that another rank stores, in a known structure) has no digest to compare.
    found = digest(each.data) if len(each.data) == piece.nbytes else b""
    return Chunk(
        tensor=number_of[piece.leaf],
        offset=piece.box.offset,
        size=piece.box.size,
        object=part,
        start=start,
        nbytes=piece.nbytes,
        digest=found,
    )


def _grouped(staged: Sequence[StagedPiece]) -> Iterator[list[StagedPiece]]:
    """Yield runs of pieces that go into one object each: few objects, none of them too large for one upload."""
    group: list[StagedPiece] = []
    nbytes = 0
    for each in staged:
        if group and nbytes + each.piece.nbytes > MAX_OBJECT_NBYTES:
            yield group
            group, nbytes = [], 0
        group.append(each)
        nbytes += each.piece.nbytes
    if group:
        yield group
