"""How messages cross a socket: each with its length before it."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from resilient.writer.messages import Answer, Order

M = TypeVar("M")

ORDERS: Final = msgspec.msgpack.Decoder(Order)
ANSWERS: Final = msgspec.msgpack.Decoder(Answer)

_LOOK_S: Final = 1.0
_LENGTH: Final = struct.Struct("<Q")
_encoder: Final = msgspec.msgpack.Encoder()


class Wire:
    """One end of a connection. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket, *, send_timeout_s: float) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        whole = int(send_timeout_s)
        # Not settimeout(): that would make the receiving side, which waits for as long as it takes, non-blocking too.
        limit = struct.pack("@ll", whole, int((send_timeout_s - whole) * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Order | Answer) -> None:
        """Send a message; raise `OSError` if the other side is gone, or has not listened for too long.

        After an error the connection is of no use: a part of the message may be on its way.
        """
        content = _encoder.encode(message)
        with self._sending:
            self._connection.sendall(_LENGTH.pack(len(content)) + content)

    def receive(self, decoder: msgspec.msgpack.Decoder[M], ended: Callable[[], bool]) -> M | None:
        """Return the next message; None if the other side has ended, be it in the middle of one.

        ``ended`` is asked while nothing comes: processes that the trainer has forked, such as data loaders, may have
        inherited either end of the socket, and keep it open.
        """
        header = self._read(_LENGTH.size, ended)
        content = None if header is None else self._read(_LENGTH.unpack(header)[0], ended)
        return None if content is None else decoder.decode(content)

    def hang_up(self) -> None:
        """End the conversation: the other side hears no more, nor does this one."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other side was quicker

    def close(self) -> None:
        with self._sending:  # not while another thread writes: its number may be somebody else's file a moment later
            self._connection.close()

    def _read(self, nbytes: int, ended: Callable[[], bool]) -> bytearray | None:
        content = bytearray(nbytes)
        rest = memoryview(content)
        while rest:
            if not self._poll.poll(_LOOK_S * 1000):
                if ended() and not self._poll.poll(0):  # its last words may just have come
                    return None
                continue
            try:
                count = self._connection.recv_into(rest)
            except ConnectionResetError:
                return None
            if count == 0:
                return None
            rest = rest[count:]
        return content
