"""A bucket of S3, Google Cloud Storage or Azure as a store, through obstore.

obstore sends memoryviews as they are, several parts at a time, without Python's lock: an upload costs the training next
to no CPU and no memory.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from functools import partial
from http import HTTPStatus
from typing import Final

from obstore.exceptions import AlreadyExistsError, BaseError

from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.errors import CorruptError, ErrorKind, StoreError
from resilient.format.digest import BytesLike
from resilient.store.base import Capabilities
from resilient.store.keys import checked_key, checked_prefix
from resilient.store.obstore_clients import Clients
from resilient.store.obstore_replies import reply
from resilient.store.recognizing import is_ours
from resilient.store.remote_faults import faults
from resilient.store.retrying import TIMEOUT_S, retry
from resilient.store.throttled import UNBOUNDED, Bandwidth

REQUEST_BYTES: Final = 16 << 20
"""The largest body of one request (of an object of more than 160 GB, more): what a failure costs."""

IN_FLIGHT: Final = 4
"""How many requests one call has under way: enough to fill a network card, few enough to leave the server alone."""

_MOST_PARTS: Final = 10_000  # of one object, says S3
_COPY_BYTES: Final = 1 << 20  # of an answer, gathered before it goes to its place: few enough to stay in cache
_KEYS_PER_PAGE: Final = 1_000


class ObjectStore:
    """Objects below a prefix of a bucket. The bucket is never made.

    Requests move at most `REQUEST_BYTES` and end within the time-outs of the client. Larger objects go up in parts, of
    which nothing is visible before the last has arrived, and come down in ranges, each repeated by itself. An object
    whose checksum the server refuses is a retryable error: it was damaged on its way.
    """

    capabilities = Capabilities(conditional_create=True, atomic_put=True, ranged_read=True)

    def __init__(self, url: str, connect: Callable[[], Clients], *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._url = url
        self._connect = connect
        self._connected: Clients | None = None
        self._connecting = threading.Lock()
        self._clock = clock
        self._bandwidth = UNBOUNDED

    @property
    def url(self) -> str:
        return self._url

    def throttled(self, bandwidth: Bandwidth) -> ObjectStore:
        """Return the same store, which waits for ``bandwidth`` before each part that it sends."""
        other = copy.copy(self)
        other._bandwidth = bandwidth  # noqa: SLF001 -- its own class
        return other

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        path = checked_key(key)
        views = [view for part in parts if (view := memoryview(part).cast("B")).nbytes]
        nbytes = sum(view.nbytes for view in views)
        with self._faults("put", key):
            if nbytes <= REQUEST_BYTES:
                self._clients.once.put(path, list(self._sent(views)), use_multipart=False)
            else:
                size = max(REQUEST_BYTES, -(-nbytes // _MOST_PARTS))
                self._clients.again.put(
                    path, self._sent(views), use_multipart=True, chunk_size=size, max_concurrency=IN_FLIGHT
                )

    def create(self, key: str, data: bytes) -> bool:
        path = checked_key(key)
        with self._faults("create", key):
            try:
                self._clients.once.put(path, data, mode="create")
            except AlreadyExistsError:
                pass
            else:
                return True
        return is_ours(self, key, data)

    def get(self, key: str) -> bytes:
        path = checked_key(key)
        with self._faults("get", key, reads=True):
            answer = self._clients.once.get(path)
            size = answer.meta["size"]
            if size <= REQUEST_BYTES:
                return bytes(answer.bytes())  # one request is all that a document costs
        del answer  # and its connection, before others are made
        content = bytearray(size)
        self.read_into(key, 0, memoryview(content))
        return bytes(content)

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        view = into.cast("B")
        if view.nbytes == 0:
            self.size(key)  # nothing to read, but a missing object is still an error
        elif view.nbytes <= REQUEST_BYTES:
            self._read_range(key, start, view)
        else:
            reads = [
                partial(self._read_range, key, start + offset, view[offset : offset + REQUEST_BYTES])
                for offset in range(0, view.nbytes, REQUEST_BYTES)
            ]
            doing = f"read of {key!r} in {self.url}"
            _side_by_side([partial(retry, each, doing=doing, clock=self._clock, timeout_s=TIMEOUT_S) for each in reads])

    def size(self, key: str) -> int:
        with self._faults("size", key, reads=True):
            return self._clients.once.head(checked_key(key))["size"]

    def written_at(self, key: str) -> datetime:
        """Return when an object was written, by the server's clock, to the second."""
        with self._faults("time", key, reads=True):
            return self._clients.once.head(checked_key(key))["last_modified"]

    def list(self, prefix: str) -> Iterator[str]:
        with self._faults("list", prefix):
            for page in self._clients.once.list(checked_prefix(prefix) or None, chunk_size=_KEYS_PER_PAGE):
                yield from (entry["path"] for entry in page if entry["path"])

    def folders(self, prefix: str) -> Iterator[str]:
        with self._faults("list", prefix):
            found = self._clients.once.list_with_delimiter(checked_prefix(prefix) or None)
        return (path.removeprefix(prefix).rstrip("/") for path in found["common_prefixes"])

    def delete(self, key: str) -> None:
        with self._faults("delete", key, reads=True), suppress(FileNotFoundError):
            self._clients.once.delete(checked_key(key))

    def close(self) -> None:
        """Connections belong to the client and go with it."""

    @property
    def _clients(self) -> Clients:
        # Not in `__init__`: it may ask for a token. Under a lock, since every thread would look for credentials.
        with self._connecting:
            if self._connected is None:
                self._connected = self._connect()
            return self._connected

    def _faults(self, verb: str, key: str, *, reads: bool = False) -> AbstractContextManager[None]:
        return faults(f"{verb} of {key!r}", self.url, reads=reads)

    def _sent(self, views: Sequence[memoryview]) -> Iterator[memoryview]:
        """Yield the content, at most a request at a time, as fast as it may be sent."""
        return self._bandwidth.paced(
            view[offset : offset + REQUEST_BYTES] for view in views for offset in range(0, view.nbytes, REQUEST_BYTES)
        )

    def _read_range(self, key: str, start: int, into: memoryview) -> None:
        end = start + into.nbytes
        with self._faults("read", key, reads=True):
            size, filled = self._fill(checked_key(key), start, into)
        if size < end:
            message = f"object {key!r} in {self.url} ends at byte {size}; bytes {start} to {end} are wanted"
            raise CorruptError(message, kind=ErrorKind.MALFORMED)
        if filled != into.nbytes:
            message = f"read of {key!r} in {self.url}: {filled} bytes came where {into.nbytes} were due"
            raise StoreError(message, kind=ErrorKind.IO, retryable=True)

    def _fill(self, path: str, start: int, into: memoryview) -> tuple[int, int]:
        """Return the size of the object, and how many bytes of ``into`` are filled."""
        try:
            answer = self._clients.once.get(path, options={"range": (start, start + into.nbytes)})
        except BaseError as error:
            said = reply(error)
            if said is None or said.status != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise
            return self._clients.once.head(path)["size"], 0  # the range starts behind the end
        filled = 0
        for piece in answer.stream(min_chunk_size=_COPY_BYTES):
            taken = piece[: into.nbytes - filled]
            into[filled : filled + len(taken)] = taken
            filled += len(piece)
        return answer.meta["size"], filled


def _side_by_side(calls: Sequence[Callable[[], None]]) -> None:
    """Make all calls, `IN_FLIGHT` at a time, and raise what the first of them raises."""
    with ThreadPoolExecutor(IN_FLIGHT, "resilient-read") as pool:
        try:
            for future in [pool.submit(call) for call in calls]:
                future.result()
        except BaseException:
            # Those under way are waited for: they write into the caller's memory.
            pool.shutdown(cancel_futures=True)
            raise
