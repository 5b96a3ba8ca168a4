"""What a checkpoint holds, read from its manifest: all of it, or the parts that somebody needs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from resilient.catalog.once import again_if_corrupt, read_or_none
from resilient.catalog.parallel import in_order
from resilient.errors import CorruptError, ErrorKind, NotFoundError
from resilient.format.chunks import Boxes, Chunks
from resilient.format.digest import BytesLike, digest
from resilient.format.documents import Commit, Item, Manifest, Object, Tensor, Value
from resilient.format.layout import Attempt
from resilient.format.manifests import Index, decode_index, decode_manifest, decode_pages
from resilient.store.base import Store

_WHOLE_NBYTES: Final = 1 << 20
"""Up to this size a manifest is read at once: one round trip, where its parts would be two."""
_REQUEST_NBYTES: Final = 4 << 20
_GAP_NBYTES: Final = 32 << 10
_READERS: Final = 128


class Contents(Protocol):
    """What a manifest says, however much of it has been read."""

    @property
    def attempt(self) -> Attempt: ...
    @property
    def world_size(self) -> int: ...
    @property
    def items(self) -> tuple[Item, ...]: ...
    @property
    def tensors(self) -> tuple[Tensor, ...]: ...
    @property
    def objects(self) -> tuple[Object, ...]: ...
    @property
    def values(self) -> tuple[Value, ...]: ...
    def overlapping(self, wanted: Boxes) -> Chunks:
        """Return the chunks that share an element with any of these boxes, each once."""
        ...


@runtime_checkable
class Foreign(Protocol):
    """A place that another library has written, which knows by itself what it holds."""

    def contents(self) -> Contents: ...
    def manifest(self, *, digests: bool = True) -> Manifest:
        """Return all of it; without digests, little is read, and nothing can be read by it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Neighboring pages, read with one request."""

    pages: tuple[int, ...]
    start: int
    nbytes: int


class PartialManifest:
    """A manifest of which only the index has been read; chunks are read when they are asked for, and not kept."""

    def __init__(self, store: Store, key: str, index: Index) -> None:
        self._store = store
        self._key = key
        self._index = index

    @property
    def attempt(self) -> Attempt:
        return self._index.attempt

    @property
    def world_size(self) -> int:
        return self._index.world_size

    @property
    def items(self) -> tuple[Item, ...]:
        return self._index.items

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._index.tensors

    @property
    def objects(self) -> tuple[Object, ...]:
        return self._index.objects

    @property
    def values(self) -> tuple[Value, ...]:
        return self._index.values

    def overlapping(self, wanted: Boxes) -> Chunks:
        """Return the chunks that share an element with any of these boxes, each once.

        Reads the pages that may hold some, each compared with its digest.

        Raises:
            CorruptError: a page is missing or not what was written; the object is named.
        """
        spans = list(_spans(self._index, self._index.holding(wanted)))

        def read() -> Chunks:
            pages = itertools.chain.from_iterable(in_order(self._read, spans, threads=_READERS))
            return Chunks.joined([chunks.overlapping(wanted) for chunks in decode_pages(self._index, pages, self._key)])

        return again_if_corrupt(read)

    def _read(self, span: _Span) -> list[tuple[int, memoryview]]:
        """Return the number and the bytes of each page."""
        data = memoryview(bytearray(span.nbytes))
        try:
            self._store.read_into(self._key, span.start, data)
        except NotFoundError as error:
            raise _missing(self._key, self.attempt) from error
        starts = [int(self._index.start[page]) - span.start for page in span.pages]
        ends = [start + int(self._index.nbytes[page]) for start, page in zip(starts, span.pages, strict=True)]
        return [(page, data[start:end]) for page, start, end in zip(span.pages, starts, ends, strict=True)]


def read_manifest(store: Store, commit: Commit) -> Manifest:
    """Return the manifest that a COMMIT names, all of it.

    Raises:
        CorruptError: it is missing, has another size or digest, or is another attempt's; the object is named.
    """
    return store.manifest() if isinstance(store, Foreign) else again_if_corrupt(lambda: _read_manifest(store, commit))


def _read_manifest(store: Store, commit: Commit) -> Manifest:
    key = commit.attempt.manifest(commit.manifest)
    content = read_or_none(store, key)
    if content is None:
        raise _missing(key, commit.attempt)
    if len(content) != commit.manifest_nbytes:
        raise CorruptError(
            f"{key} has {len(content)} bytes instead of {commit.manifest_nbytes}", kind=ErrorKind.MALFORMED
        )
    _check_digest(commit, memoryview(content)[len(content) - (commit.index_nbytes or len(content)) :])
    manifest = decode_manifest(content, commit.index_nbytes, key)
    _check_attempt(commit, manifest)
    return manifest


def read_outline(store: Store, commit: Commit) -> Manifest:
    """Return a manifest to look at: of what another library has written, without reading the data for digests."""
    return store.manifest(digests=False) if isinstance(store, Foreign) else read_manifest(store, commit)


def open_manifest(store: Store, commit: Commit) -> Contents:
    """Return the manifest that a COMMIT names, of a large one only what there is beside the chunks.

    Raises:
        CorruptError: it is missing, has another size or digest, or is another attempt's; the object is named.
    """
    if isinstance(store, Foreign):
        return store.contents()
    index_nbytes = commit.index_nbytes
    if index_nbytes is None or commit.manifest_nbytes <= _WHOLE_NBYTES or not store.capabilities.ranged_read:
        return read_manifest(store, commit)
    return again_if_corrupt(lambda: _open_manifest(store, commit, index_nbytes))


def _open_manifest(store: Store, commit: Commit, index_nbytes: int) -> PartialManifest:
    key = commit.attempt.manifest(commit.manifest)
    data = memoryview(bytearray(index_nbytes))
    try:
        store.read_into(key, commit.manifest_nbytes - index_nbytes, data)
    except NotFoundError as error:
        raise _missing(key, commit.attempt) from error
    _check_digest(commit, data)
    manifest = PartialManifest(store, key, decode_index(bytes(data), key))
    _check_attempt(commit, manifest)
    return manifest


def _spans(index: Index, pages: Sequence[int]) -> Iterator[_Span]:
    run: list[int] = []
    for page in pages:
        if run and not _joins(index, run, page):
            yield _span(index, run)
            run = []
        run.append(page)
    if run:
        yield _span(index, run)


def _joins(index: Index, run: Sequence[int], page: int) -> bool:
    gap = index.start[page] - index.start[run[-1]] - index.nbytes[run[-1]]
    nbytes = index.start[page] + index.nbytes[page] - index.start[run[0]]
    return bool(gap <= _GAP_NBYTES and nbytes <= _REQUEST_NBYTES)


def _span(index: Index, run: Sequence[int]) -> _Span:
    start = int(index.start[run[0]])
    return _Span(pages=tuple(run), start=start, nbytes=int(index.start[run[-1]] + index.nbytes[run[-1]]) - start)


def _check_digest(commit: Commit, named: BytesLike) -> None:
    if digest(named).hex() != commit.manifest:
        key = commit.attempt.manifest(commit.manifest)
        raise CorruptError(f"{key} is not what was written: its digest differs", kind=ErrorKind.BAD_DIGEST)


def _check_attempt(commit: Commit, found: Contents) -> None:
    if found.attempt != commit.attempt:
        key = commit.attempt.manifest(commit.manifest)
        raise CorruptError(f"{key} describes {found.attempt}", kind=ErrorKind.MALFORMED)


def _missing(key: str, attempt: Attempt) -> CorruptError:
    return CorruptError(f"{key} is missing, though {attempt} is committed", kind=ErrorKind.MALFORMED)
