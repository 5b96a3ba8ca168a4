"""A directory of any fsspec filesystem as a store."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fsspec.asyn import sync
from fsspec.spec import AbstractBufferedFile

from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.errors import CorruptError, ErrorKind, NotFoundError, StoreError
from resilient.format.digest import BytesLike
from resilient.store.base import Capabilities
from resilient.store.keys import checked_key, checked_prefix
from resilient.store.per_process import PerProcess
from resilient.store.pieces import pieces, total
from resilient.store.remote_faults import faults
from resilient.store.retrying import TIMEOUT_S, retry
from resilient.store.throttled import UNBOUNDED, Bandwidth

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

FRESH: Final = {"use_listings_cache": False, "skip_instance_cache": True}
"""What every filesystem is opened with: a cached listing hides what another process has committed."""

_BLOCK_BYTES = 16 << 20
_MOST_BLOCKS = 10_000
_CALL_TIMEOUT_S = 90.0  # of a call that moves at most a block
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "r2"})


class FsspecStore:
    """Objects as files of an fsspec filesystem, below one path.

    fsspec promises neither an atomic write nor a create that only one of several writers wins, so neither is declared
    (whole objects are, for the object stores): fit for one run at a time. Calls of asynchronous filesystems end within
    a bounded time; for others the filesystem's own timeouts hold.
    """

    def __init__(
        self, filesystem: AbstractFileSystem, path: str, *, url: str | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
        self._has_folders = protocols.isdisjoint(_OBJECT_STORES)
        self._filesystem = PerProcess(filesystem)
        self._root = path.rstrip("/")
        self._url = filesystem.unstrip_protocol(path) if url is None else url
        self._clock = clock
        self._bandwidth = UNBOUNDED

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(conditional_create=False, atomic_put=not self._has_folders, ranged_read=True)

    def throttled(self, bandwidth: Bandwidth) -> FsspecStore:
        """Return the same store, which waits for ``bandwidth`` before each block that it sends."""
        other = copy.copy(self)
        other._bandwidth = bandwidth  # noqa: SLF001 -- its own class
        return other

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        path = self._path(key)
        with faults(f"put of {key!r}", self._url):
            try:
                self._write(path, parts)
            except FileNotFoundError:
                if not self._has_folders:
                    raise  # of an object store only the bucket can be missing, and that is never made
                self._call("makedirs", path.rpartition("/")[0], exist_ok=True)
                self._write(path, parts)

    def create(self, key: str, data: bytes) -> bool:
        with suppress(NotFoundError):
            return self.get(key) == data
        self.put(key, [data])
        return self.get(key) == data  # of writers that were here together, all but the last see that they lost

    def get(self, key: str) -> bytes:
        with faults(f"get of {key!r}", self._url, reads=True):
            content: bytes = self._call("cat_file", self._path(key))
            return content

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        view = into.cast("B")
        if view.nbytes == 0:
            self.size(key)  # nothing to read, but a missing object is still an error
        for offset in range(0, view.nbytes, _BLOCK_BYTES):
            block = view[offset : offset + _BLOCK_BYTES]
            read = partial(self._read_block, key, start + offset, block)
            if view.nbytes <= _BLOCK_BYTES:
                read()
            else:
                retry(read, doing=f"read of {key!r} in {self._url}", clock=self._clock, timeout_s=TIMEOUT_S)

    def size(self, key: str) -> int:
        with faults(f"size of {key!r}", self._url, reads=True):
            found = self._call("info", self._path(key))
            if found["type"] == "directory":
                raise FileNotFoundError(key)
            return int(found["size"])

    def list(self, prefix: str) -> Iterator[str]:
        with faults(f"list of {prefix!r}", self._url):
            try:
                found = self._call("find", self._folder(prefix), detail=True)
            except FileNotFoundError:
                return iter(())
            # Of a folder in which nothing is, some filesystems give the folder itself.
            return iter([self._key(path) for path, entry in found.items() if entry["type"] != "directory"])

    def folders(self, prefix: str) -> Iterator[str]:
        with faults(f"list of {prefix!r}", self._url):
            try:
                found = self._call("ls", self._folder(prefix), detail=True)
            except FileNotFoundError:
                return iter(())
            return iter(
                [entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory"]
            )

    def delete(self, key: str) -> None:
        with faults(f"delete of {key!r}", self._url), suppress(FileNotFoundError):
            self._call("rm_file", self._path(key))

    def close(self) -> None:
        """Connections belong to the filesystem and go with it."""

    def _path(self, key: str) -> str:
        return f"{self._root}/{checked_key(key)}"

    def _folder(self, prefix: str) -> str:
        return f"{self._root}/{checked_prefix(prefix)}".rstrip("/")

    def _key(self, path: str) -> str:
        return path.lstrip("/").removeprefix(self._root.lstrip("/")).lstrip("/")

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        filesystem = self._filesystem.get()
        if filesystem.async_impl:
            call = getattr(filesystem, f"_{method}")
            return sync(filesystem.loop, call, *arguments, timeout=_CALL_TIMEOUT_S, **options)
        return getattr(filesystem, method)(*arguments, **options)

    def _write(self, path: str, parts: Sequence[BytesLike]) -> None:
        nbytes = total(parts)
        block = max(_BLOCK_BYTES, -(-nbytes // _MOST_BLOCKS))
        file = None if nbytes <= _BLOCK_BYTES else self._filesystem.get().open(path, "wb", block_size=block)
        # A file of the base class itself (a filesystem that opens none, such as fsspec's own wrapper that makes others
        # asynchronous) takes all blocks, stores nothing, and says nothing.
        if file is None or type(file) is AbstractBufferedFile:
            self._bandwidth.wait(nbytes)
            self._call("pipe_file", path, b"".join(parts))
            return
        try:
            for piece in self._bandwidth.paced(pieces(parts, block)):
                file.write(piece)
        except BaseException:
            _abandon(file)
            raise
        file.close()

    def _read_block(self, key: str, start: int, into: memoryview) -> None:
        end = start + into.nbytes
        with faults(f"read of {key!r}", self._url, reads=True):
            body: bytes = self._call("cat_file", self._path(key), start=start, end=end)
        if len(body) == into.nbytes:
            into[:] = body
            return
        if (size := self.size(key)) < end:
            message = f"object {key!r} in {self._url} ends at byte {size}; bytes {start} to {end} are wanted"
            raise CorruptError(message, kind=ErrorKind.MALFORMED)
        message = f"read of {key!r} in {self._url}: {len(body)} bytes came where {into.nbytes} were due"
        raise StoreError(message, kind=ErrorKind.IO, retryable=True)


def _abandon(file: Any) -> None:
    """Give up a file that is being written: closing it, as ``with`` would, publishes the part that is there."""
    if isinstance(file, AbstractBufferedFile):
        with suppress(Exception):  # what is left behind is of no use to anybody; the error that led here matters more
            file.discard()
        file.closed = True
    else:
        file.close()
