"""Reading stored chunks, so that no wrong byte gets out."""

from __future__ import annotations

from resilient.catalog.contents import Contents
from resilient.errors import CorruptError, ErrorKind, NotFoundError
from resilient.format import codec, layout
from resilient.format.chunks import Chunk
from resilient.format.digest import digest
from resilient.format.documents import Tensor
from resilient.format.dtypes import ITEMSIZE
from resilient.store.base import Store


def read_chunk(store: Store, manifest: Contents, chunk: Chunk, into: memoryview) -> None:
    """Fill ``into`` (writable, `decoded_nbytes` long) with the bytes of a chunk's box, verified.

    Raises:
        CorruptError: the object is missing, short or changed; it names object, tensor and rank. ``into`` then holds
            anything.
    """
    stored = into if chunk.codec == codec.RAW else memoryview(bytearray(chunk.nbytes))
    read_span(store, manifest, chunk, chunk.start, stored)
    unpack(manifest, chunk, stored, into)


def read_span(store: Store, manifest: Contents, chunk: Chunk, start: int, into: memoryview) -> None:
    """Fill ``into`` with the object of a chunk from ``start`` on; nothing is verified yet.

    Raises:
        CorruptError: the object is missing or short; it names object, tensor and rank.
    """
    key = manifest.objects[chunk.object].key
    try:
        store.read_into(key, start, into)
    except NotFoundError as error:
        raise _corrupt(manifest, chunk, f"{key} is missing", ErrorKind.MALFORMED) from error
    except CorruptError as error:
        raise _corrupt(manifest, chunk, f"{key} is too short", ErrorKind.MALFORMED) from error


def unpack(manifest: Contents, chunk: Chunk, stored: memoryview, into: memoryview | None = None) -> memoryview:
    """Return the bytes of a chunk's box, verified, given all of its stored bytes.

    Those of a raw chunk are ``stored`` itself: nothing is copied. Others are decoded into ``into`` (writable,
    `decoded_nbytes` long; new memory if None).

    Raises:
        CorruptError: they are not what was written; it names object, tensor and rank. ``into`` then holds anything.
    """
    try:
        return decoded(manifest.tensors[chunk.tensor], chunk, stored, into)
    except CorruptError as error:
        key = manifest.objects[chunk.object].key
        raise _corrupt(manifest, chunk, f"{key} {error}", error.kind, error.hint) from error


def decoded(tensor: Tensor, chunk: Chunk, stored: memoryview, into: memoryview | None = None) -> memoryview:
    """Do what `unpack` does, for a chunk of whatever document; the error names neither object nor rank."""
    data = stored
    where = f"bytes {chunk.start} to {chunk.start + chunk.nbytes}"
    if chunk.codec != codec.RAW:
        data = memoryview(bytearray(decoded_nbytes(tensor, chunk))) if into is None else into
        try:
            codec.decode(chunk.codec, stored, data, ITEMSIZE[tensor.dtype])
        except CorruptError as error:
            what = f"is not what was written: {where}: {error}"
            raise CorruptError(what, kind=error.kind, hint=error.hint) from error
    if digest(data) != chunk.digest:
        what = f"is not what was written: the digest of {where} differs"
        raise CorruptError(what, kind=ErrorKind.BAD_DIGEST)
    return data


def decoded_nbytes(tensor: Tensor, chunk: Chunk) -> int:
    """Return how many bytes the box of a chunk takes; ``chunk.nbytes`` is how many are stored for it."""
    return chunk.box.volume * ITEMSIZE[tensor.dtype]


def writer_of(manifest: Contents, chunk: Chunk) -> int | None:
    """Return the rank that stored a chunk; None if its object is named in a way that does not say."""
    return layout.parse_rank(manifest.objects[chunk.object].key)


def _corrupt(manifest: Contents, chunk: Chunk, what: str, kind: ErrorKind, hint: str | None = None) -> CorruptError:
    tensor = manifest.tensors[chunk.tensor]
    rank = writer_of(manifest, chunk)
    whose = "" if rank is None else f", stored by rank {rank}"
    return CorruptError(
        f"{what} (tensor {tensor.name!r} of item {tensor.item!r}{whose})", kind=kind, hint=hint, rank=rank
    )
