"""An S3 endpoint that throws away what is put and serves what never was: what is left is the client's own cost.

Usage: python benchmarks/null_s3.py

Prints its port. It checks nothing. Every object has the size that its key ends in, as in `any/name-1048576`.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass

MIB = 1 << 20
CONTENT = memoryview(os.urandom(MIB) * 16)  # of every object, again and again; enough not to stay in the processor
ETAG = '"0123456789abcdef0123456789abcdef"'
XML = '<?xml version="1.0"?>'
STARTED = f"{XML}<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
COMPLETED = f"{XML}<CompleteMultipartUploadResult><ETag>{ETAG}</ETag></CompleteMultipartUploadResult>"
LISTED = f"{XML}<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"


@dataclass(frozen=True, slots=True)
class Head:
    """The first lines of a request."""

    method: str
    path: str
    query: str
    headers: dict[str, str]


class Connection:
    """One client: requests one after the other."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self._buffer = memoryview(bytearray(MIB))
        self._pending = b""

    def serve(self) -> None:
        self._client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._client, suppress(ConnectionError):
            while head := self._head():
                if "expect" in head.headers:
                    self._client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                self._discard(int(head.headers.get("content-length", 0)))
                self._answer(head)

    def _head(self) -> Head | None:
        while b"\r\n\r\n" not in self._pending:
            count = self._client.recv_into(self._buffer, 65_536)
            if not count:
                return None
            self._pending += self._buffer[:count]
        text, _, self._pending = self._pending.partition(b"\r\n\r\n")
        first, *lines = text.decode("latin1").split("\r\n")
        method, target, _ = first.split(" ")
        path, _, query = target.partition("?")
        named = (line.partition(":") for line in lines)
        return Head(method, path, query, {name.lower(): value.strip() for name, _, value in named})

    def _discard(self, nbytes: int) -> None:
        left = nbytes - len(self._pending)
        self._pending = self._pending[nbytes:]
        while left > 0:
            left -= self._client.recv_into(self._buffer, min(left, MIB))

    def _answer(self, head: Head) -> None:
        match head.method:
            case "POST":
                self._say("200 OK", STARTED if "uploads" in head.query else COMPLETED)
            case "PUT":
                self._say("200 OK")
            case "DELETE":
                self._say("204 No Content")
            case _ if "list-type" in head.query:
                self._say("200 OK", LISTED)
            case _:
                self._serve_content(head)

    def _say(self, status: str, body: str = "") -> None:
        self._client.sendall(self._lines(status, len(body)) + body.encode())

    def _lines(self, status: str, nbytes: int, *more: str) -> bytes:
        lines = (f"HTTP/1.1 {status}", f"Content-Length: {nbytes}", f"ETag: {ETAG}", *more, "", "")
        return "\r\n".join(lines).encode()

    def _serve_content(self, head: Head) -> None:
        size = int(head.path.rpartition("-")[2])
        start, end, status = 0, size, "200 OK"
        more = ["Last-Modified: Mon, 30 Nov 2026 00:00:00 GMT", "Content-Type: application/octet-stream"]
        if found := re.fullmatch(r"bytes=(\d+)-(\d+)", head.headers.get("range", "")):
            start, end, status = int(found[1]), min(int(found[2]) + 1, size), "206 Partial Content"
            more.append(f"Content-Range: bytes {start}-{end - 1}/{size}")
        self._client.sendall(self._lines(status, end - start, *more))
        while head.method == "GET" and start < end:
            offset = start % len(CONTENT)
            piece = CONTENT[offset : offset + min(4 * MIB, end - start)]
            self._client.sendall(piece)
            start += len(piece)


def main() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            client, _ = server.accept()
            threading.Thread(target=Connection(client).serve, daemon=True).start()


if __name__ == "__main__":
    main()
