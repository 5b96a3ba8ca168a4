"""Bringing a checkpoint to another place, verified, whole or not at all."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

import msgspec

from resilient.catalog.commit import try_commit, write_receipt
from resilient.catalog.contents import read_manifest
from resilient.catalog.fetch import read_span, unpack, writer_of
from resilient.catalog.generations import claim_generation, write_base
from resilient.catalog.line import read_line
from resilient.catalog.prune import give_up
from resilient.catalog.run_info import open_run
from resilient.catalog.select import select
from resilient.clock import Clock
from resilient.errors import ErrorKind, ResilientError, UsageError
from resilient.format.chunks import Chunk, Chunks
from resilient.format.documents import Commit, Manifest, Object, Receipt
from resilient.format.layout import Attempt
from resilient.store.base import Store

_OBJECT_NBYTES: Final = 128 << 20
"""How much of the data is in memory at once, and how large the objects of a copy are."""

_Placed: TypeAlias = tuple[tuple[Object, ...], tuple[Chunk, ...]]


def copy(
    source: Store,
    commit: Commit,
    destination: Store,
    *,
    items: Sequence[str] | None = None,
    clock: Clock,
    progress: Callable[[int, int], None] | None = None,
) -> Commit:
    """Copy a checkpoint, or some of its items, into an empty place; return its COMMIT there.

    Every chunk is compared with its digest on its way, and stored as it was, compressed or not. What the checkpoint
    shares with an earlier one is copied too: the copy stands alone. Nothing counts in the destination before all of it
    is durable; if anything fails, what was written is removed again, as far as the destination lets us.

    Args:
        source: the run.
        commit: which checkpoint.
        destination: an empty place, or a run without any checkpoint.
        items: only these; None for all.
        clock: for the times that people read.
        progress: called with the bytes copied and the bytes to copy.

    Raises:
        UsageError: the destination holds something already.
        NotFoundError: the checkpoint has no such item.
        CorruptError: it is damaged; object, tensor and rank are named.
    """
    manifest = select(read_manifest(source, commit), items)
    _refuse_full(destination, clock)
    claim = claim_generation(
        destination, world_size=manifest.world_size, launch=uuid.uuid4().hex, heartbeat=False, clock=clock
    )
    write_base(destination, claim, None)
    attempt = Attempt(step=commit.step, generation=claim.generation, nonce=claim.nonce)
    written: list[str] = []
    committing = False
    try:
        placed = _copy_data(source, manifest, destination, attempt, written, progress)
        for rank in range(manifest.world_size):
            receipt = _receipt(manifest, attempt, rank, *placed.get(rank, ((), ())))
            write_receipt(destination, receipt)
            written.append(attempt.receipt(rank))
        committing = True
        outcome = try_commit(
            destination,
            attempt,
            world_size=manifest.world_size,
            committer=0,
            reason=commit.reason,
            clock=clock,
            metrics=commit.metrics,
        )
    except BaseException:
        # A COMMIT whose response was lost is there, or comes yet: without its data it must not count.
        if not committing or _given_up(destination, attempt, clock):
            _remove(destination, written)
        raise
    assert isinstance(outcome, Commit), "all receipts were written just now"
    return outcome


def _refuse_full(destination: Store, clock: Clock) -> None:
    try:
        open_run(destination, create=True, clock=clock)
    except UsageError as error:
        raise UsageError(str(error), kind=ErrorKind.DESTINATION_NOT_EMPTY, hint="name a place that is empty") from error
    line = read_line(destination)
    if line.commits or line.ignored:
        steps = ", ".join(str(commit.step) for commit in line.commits[:5])
        raise UsageError(
            f"{destination.url} holds checkpoints already (steps {steps})",
            kind=ErrorKind.DESTINATION_NOT_EMPTY,
            hint="name a place that is empty",
        )


def _copy_data(
    source: Store,
    manifest: Manifest,
    destination: Store,
    attempt: Attempt,
    written: list[str],
    progress: Callable[[int, int], None] | None,
) -> dict[int, _Placed]:
    """Copy all chunks; return, for each rank, the objects and chunks that its receipt there lists."""
    by_rank: defaultdict[int, list[Chunk]] = defaultdict(list)
    writers: dict[int, int] = {}
    for chunk in manifest.chunks:
        if chunk.object not in writers:
            # An object that is referred to may have been stored by a rank that this world does not have.
            writer = writer_of(manifest, chunk) or 0
            writers[chunk.object] = writer if writer < manifest.world_size else 0
        rank = manifest.tensors[chunk.tensor].rank
        by_rank[writers[chunk.object] if rank is None else rank].append(chunk)
    total = sum(chunk.nbytes for chunk in manifest.chunks)
    done = 0
    placed: dict[int, _Placed] = {}
    for rank, chunks in sorted(by_rank.items()):
        objects: list[Object] = []
        moved: list[Chunk] = []
        for group in _grouped(sorted(chunks, key=lambda one: (one.object, one.start))):
            key = attempt.data(rank, len(objects))
            buffers = []
            start = 0
            for chunk in group:
                buffer = memoryview(bytearray(chunk.nbytes))
                read_span(source, manifest, chunk, chunk.start, buffer)
                unpack(manifest, chunk, buffer)  # stays encoded: what is compared is what it stands for
                buffers.append(buffer)
                moved.append(msgspec.structs.replace(chunk, object=len(objects), start=start))
                start += chunk.nbytes
            written.append(key)
            destination.put(key, buffers)
            objects.append(Object(key=key, nbytes=start))
            done += start
            if progress is not None:
                progress(done, total)
        placed[rank] = (tuple(objects), tuple(moved))
    return placed


def _grouped(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    group: list[Chunk] = []
    nbytes = 0
    for chunk in chunks:
        if group and nbytes + chunk.nbytes > _OBJECT_NBYTES:
            yield group
            group, nbytes = [], 0
        group.append(chunk)
        nbytes += chunk.nbytes
    if group:
        yield group


def _receipt(
    manifest: Manifest, attempt: Attempt, rank: int, objects: tuple[Object, ...], chunks: tuple[Chunk, ...]
) -> Receipt:
    """Return a rank's receipt: rank 0 lists what all ranks share, each rank what is its own and what it stores."""
    per_rank = {item.name for item in manifest.items if item.per_rank}
    stored = {chunk.tensor for chunk in chunks}
    tensors = [
        number
        for number, tensor in enumerate(manifest.tensors)
        if number in stored or tensor.rank == rank or (rank == 0 and tensor.rank is None)
    ]
    numbers = {number: position for position, number in enumerate(tensors)}
    values = tuple(value for value in manifest.values if value.rank == rank or (rank == 0 and value.rank is None))
    own = {value.item for value in values} | {manifest.tensors[number].item for number in tensors}
    # A derived item of a rank that had none stays absent; any other per-rank item is listed even if it is empty.
    items = tuple(
        item
        for item in manifest.items
        if item.name in own or (rank == 0 and item.name not in per_rank) or (item.per_rank and not item.derived)
    )
    return Receipt(
        step=attempt.step,
        generation=attempt.generation,
        nonce=attempt.nonce,
        rank=rank,
        world_size=manifest.world_size,
        items=items,
        tensors=tuple(manifest.tensors[number] for number in tensors),
        objects=objects,
        chunks=Chunks.of(msgspec.structs.replace(chunk, tensor=numbers[chunk.tensor]) for chunk in chunks),
        values=values,
    )


def _given_up(destination: Store, attempt: Attempt, clock: Clock) -> bool:
    try:
        give_up(destination, attempt, clock, reason="the copy failed")
    except ResilientError:
        return False  # then all of it stays, and what led here matters more
    return True


def _remove(destination: Store, keys: Sequence[str]) -> None:
    for key in keys:
        try:
            destination.delete(key)
        except ResilientError:
            return  # what led here matters more, and what is left never counts
