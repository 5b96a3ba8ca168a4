"""A key-value server of torch (a c10d endpoint) as the place of a job's rounds, where nodes share no storage.

Late nodes, silent ones and resizes are handled as they are with a place on a disk or in a bucket. But what is kept in
one process is gone with it: when the host of the server dies, the job ends, as with torch's own c10d rendezvous.
"""

from __future__ import annotations

import base64
import errno
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final, TypeVar

import torch.distributed as dist

from resilient.clock import Clock, Deadline
from resilient.engine.key_values import TorchValues
from resilient.errors import ErrorKind, NotFoundError, PeerError, StoreError
from resilient.format.digest import BytesLike
from resilient.store.base import Capabilities
from resilient.store.keys import checked_key, checked_prefix
from resilient.store.whole import copy_range, folders_of

T = TypeVar("T")

_PREFIX: Final = "resilient/place/"  # the server may have other users
_NOTHING: Final = ""  # what torch's compare_set takes for "there is no value"
_SIGN: Final = b"="  # before each value, so that an empty one is something
_MOST_NBYTES: Final = 4 << 20  # torch's server hangs up on whoever sends 8 MiB and more
_ANSWER_S: Final = 10.0
_TRY_S: Final = 1.0
_POLL_S: Final = 0.2


def serve(host: str, port: int, *, is_host: bool) -> dist.TCPStore | None:
    """Start the server on this machine if it is the host; None if it is not, or another process serves there."""
    if not is_host and not _is_mine(host):
        return None
    with suppress(dist.DistNetworkError), socket.socket() as free:
        # torch tells a port that is in use with pages of native frames.
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if free.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED:
            return dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False, timeout=_seconds(_ANSWER_S))
    return None


class KeyValuePlace:
    """Small objects in the memory of a key-value server."""

    capabilities = Capabilities(conditional_create=True, atomic_put=True, ranged_read=False)

    def __init__(self, host: str, port: int, *, server: dist.TCPStore | None, timeout_s: float, clock: Clock) -> None:
        """Reach nothing yet. ``server``: the server, if it runs in this process. ``timeout_s``: for it to come up."""
        self._host = host
        self._port = port
        self._server = server
        self._timeout_s = timeout_s
        self._clock = clock
        self._known: TorchValues | None = None
        self._connecting = threading.Lock()

    @property
    def url(self) -> str:
        return f"c10d://{self._host}:{self._port}"

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        value, name = self._encoded(key, b"".join(parts)), _PREFIX + checked_key(key)

        def stored(values: TorchValues) -> bool:
            values.set(name, value)
            return values.check([name])  # a set has no answer: only after that one the server surely has it

        self._ask(stored)

    def create(self, key: str, data: bytes) -> bool:
        value, name = self._encoded(key, data).decode(), _PREFIX + checked_key(key)
        return self._ask(lambda values: values.compare_set(name, _NOTHING, value)) == value.encode()

    def get(self, key: str) -> bytes:
        name = _PREFIX + checked_key(key)
        # One after the other on one thread, but another node may delete in between: then torch waits for the key.
        found = self._ask(lambda values: values.get(name) if values.check([name]) else None)
        if found is None:
            raise NotFoundError(f"there is no object {key!r} in {self.url}", kind=ErrorKind.NO_SUCH_OBJECT)
        return base64.b64decode(found.removeprefix(_SIGN))

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        copy_range(self.get(key), start, into, key=key, url=self.url)

    def size(self, key: str) -> int:
        return len(self.get(key))

    def list(self, prefix: str) -> Iterator[str]:
        wanted = _PREFIX + checked_prefix(prefix)
        names = self._ask(lambda values: values.keys())
        return (name.removeprefix(_PREFIX) for name in names if name.startswith(wanted))

    def folders(self, prefix: str) -> Iterator[str]:
        return folders_of(self.list(prefix), prefix)

    def delete(self, key: str) -> None:
        name = _PREFIX + checked_key(key)
        self._ask(lambda values: values.delete(name))

    def close(self) -> None:
        """Nothing: the server must outlive every user of this place in this process."""

    def _encoded(self, key: str, content: bytes) -> bytes:
        """Return a value as text, for torch's compare_set takes nothing else."""
        if len(content) > _MOST_NBYTES:
            raise StoreError(
                f"object {key!r} has {len(content)} bytes; {self.url} takes {_MOST_NBYTES}", kind=ErrorKind.NO_SPACE
            )
        return _SIGN + base64.b64encode(content)

    def _ask(self, call: Callable[[TorchValues], T]) -> T:
        with self._connecting:  # two connections would see each other's values in any order
            values = self._known or self._connect()
        try:
            return call(values)
        except PeerError as error:
            gone = error.kind is ErrorKind.PEER_FAILED
            raise StoreError(
                f"the key-value server of {self.url} " + ("is gone" if gone else "does not answer"),
                kind=ErrorKind.UNREACHABLE,
                retryable=not gone,  # another one in its place would know nothing of the rounds
                hint="the rounds lived in that process; with a shared place as --rdzv-endpoint no host is special",
            ) from error

    def _connect(self) -> TorchValues:
        deadline = Deadline(self._clock, self._timeout_s)
        while self._server is None and not _listens(self._host, self._port):
            if deadline.expired:
                raise StoreError(
                    f"nobody serves {self.url}: waited {self._timeout_s:g} s",
                    kind=ErrorKind.UNREACHABLE,
                    hint="is that host's agent running, and does its name lead to it? If it does not know itself by "
                    "that name, give it --rdzv-conf=is_host=1",
                )
            self._clock.sleep(min(_POLL_S, deadline.remaining_s))
        try:
            store = self._server or dist.TCPStore(
                self._host, self._port, is_master=False, timeout=_seconds(max(deadline.remaining_s, _TRY_S))
            )
        except RuntimeError as error:
            raise StoreError(
                f"{self.url} is no key-value server of torch: {str(error).partition(chr(10))[0]}",
                kind=ErrorKind.UNREACHABLE,
            ) from error
        self._known = TorchValues(store, timeout_s=_ANSWER_S)
        return self._known


def _is_mine(host: str) -> bool:
    """Say whether a name leads to this machine: then a socket can be bound to its address."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_TRY_S).close()
    except OSError:
        return False
    return True


def _seconds(timeout_s: float) -> timedelta:
    return timedelta(seconds=timeout_s)
