"""A wire to an S3 server that loses, denies or damages what a test says: an HTTP proxy on this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


class Fault(Enum):
    FLIP_UP = "a bit of the body of the request"
    FLIP_DOWN = "a bit of the body of the answer"
    LOSE_REQUEST = "the request does not arrive"
    LOSE_ANSWER = "the answer does not arrive"
    CUT_ANSWER = "half of the answer arrives"
    DENY = "the server is not asked and says 403"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    method: str
    path: str  # with the query
    headers: dict[str, str]
    nbytes: int


@dataclass(slots=True)
class Wire:
    """``fault`` decides about each request, in the order of arrival; ``seen`` is what passed."""

    endpoint: str
    fault: Callable[[Request], Fault | None] = lambda request: None
    seen: list[Request] = field(default_factory=list)


def every(count: int, fault: Fault, wanted: Callable[[Request], bool]) -> Callable[[Request], Fault | None]:
    """Return what lets ``fault`` befall each ``count``-th of the ``wanted`` requests, the first one first."""
    turn = -1

    def decide(request: Request) -> Fault | None:
        nonlocal turn
        turn += wanted(request)
        return fault if wanted(request) and turn % count == 0 else None

    return decide


@contextmanager
def wire_to(endpoint: str) -> Iterator[Wire]:
    target = urlsplit(endpoint).netloc
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def handle_one(self) -> None:
            body = bytearray(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            request = Request(method=self.command, path=self.path, headers=dict(self.headers.items()), nbytes=len(body))
            with lock:
                wire.seen.append(request)
                fault = wire.fault(request)
            if fault is Fault.LOSE_REQUEST:
                return self._hang_up()
            if fault is Fault.DENY:
                document = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>no</Message></Error>"
                return self._say(403, {"Content-Type": "application/xml"}, document)
            if fault is Fault.FLIP_UP:
                body[len(body) // 2] ^= 1
            connection = HTTPConnection(target, timeout=30)
            connection.request(self.command, self.path, bytes(body), request.headers)
            self._answer(connection.getresponse(), fault)
            connection.close()
            return None

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one  # noqa: N815 -- what http.server looks for

        def _answer(self, response: HTTPResponse, fault: Fault | None) -> None:
            content = bytearray(response.read())
            if fault is Fault.LOSE_ANSWER:
                return self._hang_up()
            if fault is Fault.FLIP_DOWN:
                content[len(content) // 2] ^= 1
            headers = {name: value for name, value in response.getheaders() if name != "Transfer-Encoding"}
            headers.setdefault("Content-Length", str(len(content)))
            half = len(content) // 2 if fault is Fault.CUT_ANSWER else len(content)
            self._say(response.status, headers, bytes(content[:half]))
            return self._hang_up() if fault is Fault.CUT_ANSWER else None

        def _say(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response_only(status)
            for name, value in ({"Content-Length": str(len(content))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def _hang_up(self) -> None:
            self.close_connection = True

        def log_message(self, *arguments: Any) -> None:
            """Quiet."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *arguments: Any) -> None:
            """A client that gave up is none of ours."""

    with Server(("127.0.0.1", 0), Handler) as server:
        wire = Wire(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield wire
        finally:
            server.shutdown()
            with suppress(RuntimeError):
                thread.join(10)
