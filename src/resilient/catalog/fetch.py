"""Reading stored chunks, so that no wrong byte gets out."""

from __future__ import annotations

from collections.abc import Sequence

from resilient.errors import CorruptError, ErrorKind, NotFoundError
from resilient.format.digest import BytesLike, digest
from resilient.format.documents import Chunk, Manifest
from resilient.store.base import Store


def read_chunk(store: Store, manifest: Manifest, chunk: Chunk, into: memoryview) -> None:
    """Fill ``into`` (writable, ``chunk.nbytes`` long) with a chunk and verify it.

    Raises:
        CorruptError: the object is missing, short or changed; it names object, tensor and rank. ``into`` then holds
            anything.
    """
    read_span(store, manifest, [chunk], into)
    check_chunk(manifest, chunk, into)


def read_span(store: Store, manifest: Manifest, chunks: Sequence[Chunk], into: memoryview) -> None:
    """Fill ``into`` with chunks that follow each other in one object, gaps included; nothing is verified yet.

    Raises:
        CorruptError: the object is missing or short; it names object, tensor and rank.
    """
    key = manifest.objects[chunks[0].object].key
    try:
        store.read_into(key, chunks[0].start, into)
    except NotFoundError as error:
        raise _corrupt(manifest, chunks[0], f"{key} is missing", ErrorKind.MALFORMED) from error
    except CorruptError as error:
        raise _corrupt(manifest, chunks[0], f"{key} is too short", ErrorKind.MALFORMED) from error


def check_chunk(manifest: Manifest, chunk: Chunk, data: BytesLike) -> None:
    """Compare the bytes of a chunk with its digest.

    Raises:
        CorruptError: they differ; it names object, tensor and rank.
    """
    if digest(data) != chunk.digest:
        key = manifest.objects[chunk.object].key
        end = chunk.start + chunk.nbytes
        raise _corrupt(
            manifest, chunk, f"{key} is not what was written in bytes {chunk.start} to {end}", ErrorKind.BAD_DIGEST
        )


def writer_of(manifest: Manifest, chunk: Chunk) -> int | None:
    """Return the rank that stored a chunk; None if its object is named in a way that does not say."""
    key = manifest.objects[chunk.object].key
    ranks = range(manifest.world_size)
    return next((rank for rank in ranks if key.startswith(manifest.attempt.data(rank, 0).removesuffix("0"))), None)


def _corrupt(manifest: Manifest, chunk: Chunk, what: str, kind: ErrorKind) -> CorruptError:
    tensor = manifest.tensors[chunk.tensor]
    rank = writer_of(manifest, chunk)
    whose = "" if rank is None else f", stored by rank {rank}"
    return CorruptError(f"{what} (tensor {tensor.name!r} of item {tensor.item!r}{whose})", kind=kind, rank=rank)
