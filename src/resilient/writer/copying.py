"""Copies between nodes: what a rank has in its tier goes to the tier of another node, and what others send is taken.

Over a connection of its own, beside the training's: a token, then objects each with its key and length before it, the
receipt last. It counts once every object has been compared with the digests of the receipt.
"""

from __future__ import annotations

import hmac
import mmap
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from resilient.clock import Clock
from resilient.errors import CorruptError, ErrorKind, PeerError, ResilientError, StoreError
from resilient.format import layout
from resilient.format.documents import Receipt
from resilient.format.layout import Attempt
from resilient.format.receipts import decode_receipt
from resilient.store.local import LocalStore
from resilient.store.nearest import Shards
from resilient.store.throttled import Bandwidth
from resilient.writer.messages import Address, Copied

_LENGTH: Final = struct.Struct("<Q")
_PIECE_NBYTES: Final = 4 << 20
_HEADER_NBYTES: Final = 4096
_CONNECT_S: Final = 10.0
_SILENT_S: Final = 60.0
_YES, _NO = b"+", b"-"


class _Put(msgspec.Struct, array_like=True, frozen=True):
    """The next bytes are this object."""

    key: str
    nbytes: int


class Receiving:
    """Listens for copies from other nodes, and keeps them in a tier of this one, until the process ends."""

    def __init__(self, store: LocalStore) -> None:
        """Raise `OSError` if nothing can be listened to."""
        self._store = store
        self.token = secrets.token_hex(16)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, name="resilient-copies-in", daemon=True).start()

    def close(self) -> None:
        """Listen no more. Idempotent."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # a thread that waits in accept would keep it open
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._take, args=(connection,), name="resilient-copy-in", daemon=True).start()

    def _take(self, connection: socket.socket) -> None:
        with (
            connection,
            suppress(OSError, msgspec.DecodeError, ResilientError),
        ):  # the other side tells, and tries again
            connection.settimeout(_SILENT_S)
            if not hmac.compare_digest(_receive_header(connection), self.token.encode()):
                return
            while True:
                put = msgspec.msgpack.decode(_receive_header(connection), type=_Put)
                content = memoryview(bytearray(put.nbytes)) if _is_expected(put.key) else None
                if content is None:
                    return
                _fill(connection, content)
                if layout.parse_data(put.key) is not None:
                    self._store.put(put.key, [content])
                else:
                    connection.sendall(_YES if self._keep(put.key, bytes(content)) else _NO)

    def _keep(self, key: str, content: bytes) -> bool:
        """Keep a receipt if all that it promises is here and right."""
        receipt = decode_receipt(content, key)
        if receipt.attempt.receipt(receipt.rank) != key:
            return False
        shards = Shards("the copy", _WithReceipt(self._store, key, content), notice=lambda _: None)
        if not all(shards.holds(each.key) for each in receipt.objects):
            return False
        self._store.put(key, [content])
        return True


class Sending:
    """Copies the newest state of this rank to another node, one after another, on a thread of its own."""

    def __init__(
        self, store: LocalStore, say: Callable[[Copied], None], *, rank: int, bandwidth: Bandwidth, clock: Clock
    ) -> None:
        self._store = store
        self._say = say
        self._rank = rank
        self._bandwidth = bandwidth
        self._clock = clock
        self._next: tuple[Attempt, Address] | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="resilient-copies-out", daemon=True).start()

    def send(self, attempt: Attempt, to: Address) -> None:
        """Copy a state that is in the tier; one that has not been begun when the next one comes is left out."""
        with self._changed:
            self._next = (attempt, to)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None)
                order, self._next = self._next, None
            assert order is not None, "that was waited for"
            attempt, to = order
            started_s = self._clock.monotonic()
            fault, nbytes = "", 0
            try:
                nbytes = self._copy(attempt, to)
            except (OSError, ResilientError) as error:
                fault = f"copy to {to.host}:{to.port}: {error}"
            duration_s = self._clock.monotonic() - started_s
            self._say(Copied(step=attempt.step, nbytes=nbytes, duration_s=duration_s, fault=fault))

    def _copy(self, attempt: Attempt, to: Address) -> int:
        key = attempt.receipt(self._rank)
        content = self._store.get(key)
        receipt: Receipt = decode_receipt(content, key)
        nbytes = 0
        with ExitStack() as files:
            # All at once: what is open stays, also if the tier lets this state go meanwhile.
            objects = [files.enter_context(mapped(self._store, each.key, each.nbytes)) for each in receipt.objects]
            with socket.create_connection((to.host, to.port), _CONNECT_S) as connection:
                connection.settimeout(_SILENT_S)
                _send_header(connection, to.token.encode())
                for each, view in zip(receipt.objects, objects, strict=True):
                    self._put(connection, each.key, view)
                    nbytes += len(view)
                self._put(connection, key, memoryview(content))
                if connection.recv(1) != _YES:
                    raise PeerError("the other node has not taken it", kind=ErrorKind.PEER_FAILED)
        return nbytes

    def _put(self, connection: socket.socket, key: str, content: memoryview) -> None:
        _send_header(connection, msgspec.msgpack.encode(_Put(key, len(content))))
        for start in range(0, len(content), _PIECE_NBYTES):
            piece = content[start : start + _PIECE_NBYTES]
            self._bandwidth.wait(len(piece))
            connection.sendall(piece)


class _WithReceipt:
    """A tier that has one receipt already: to look at what it promises before it is there."""

    def __init__(self, store: LocalStore, key: str, content: bytes) -> None:
        self._store = store
        self._key = key
        self._content = content

    def get(self, key: str) -> bytes:
        return self._content if key == self._key else self._store.get(key)

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        self._store.read_into(key, start, into)

    def delete(self, key: str) -> None:
        self._store.delete(key)


@contextmanager
def mapped(store: LocalStore, key: str, nbytes: int) -> Iterator[memoryview]:
    """Lend the content of an object of a tier, without a copy of it."""
    if not nbytes:
        yield memoryview(b"")
        return
    with _opened(store, key) as file:
        # Not closed: it goes with the last view of it, which the frames of an error on its way may still have.
        content = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ)
    yield memoryview(content)


def _opened(store: LocalStore, key: str) -> BinaryIO:
    try:
        return Path(store.root, key).open("rb")
    except OSError as error:
        raise StoreError(f"{key} is gone from {store.url}", kind=ErrorKind.IO) from error


def _is_expected(key: str) -> bool:
    parsed = layout.parse_attempt(key)
    return layout.parse_data(key) is not None or (parsed is not None and parsed[1].startswith("receipts/"))


def _send_header(connection: socket.socket, content: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(content)) + content)


def _receive_header(connection: socket.socket) -> bytes:
    length = memoryview(bytearray(_LENGTH.size))
    _fill(connection, length)
    (nbytes,) = _LENGTH.unpack(length)
    if nbytes > _HEADER_NBYTES:
        raise CorruptError("this is no copy", kind=ErrorKind.MALFORMED)
    content = memoryview(bytearray(nbytes))
    _fill(connection, content)
    return bytes(content)


def _fill(connection: socket.socket, into: memoryview) -> None:
    while into:
        count = connection.recv_into(into)
        if not count:
            raise ConnectionResetError("the other side has ended")
        into = into[count:]
