"""A wire to a store that is reached over HTTP, which delays, loses, cuts, refuses or damages what passes it."""

from __future__ import annotations

import fnmatch
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random  # noqa: TID251 -- seeded by the caller
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

from resilient.clock import SYSTEM_CLOCK, Clock

_TIMEOUT_S: Final = 60.0
_RESET_ON_CLOSE: Final = struct.pack(
    "ii", 1, 0
)  # SO_LINGER: what closes at once sends RST, as a lost peer's kernel does
_HOP_BY_HOP: Final = frozenset({"connection", "keep-alive", "transfer-encoding", "expect"})


class HttpFault(StrEnum):
    """What may befall a request."""

    DELAY = "delay"  # it is passed on later
    HANG = "hang"  # nothing happens for so long, then the connection is reset
    RESET = "reset"  # the connection is reset before the server is asked
    RESET_IN_BODY = "reset-in-body"  # as above, half-way through the body of the request
    SLOW_DOWN = "slow-down"  # 503 SlowDown; the server is not asked
    SERVER_ERROR = "server-error"  # 500 InternalError; the server is not asked
    DENIED = "denied"  # 403 AccessDenied; the server is not asked
    EXPIRED = "expired"  # 400 ExpiredToken; the server is not asked
    INCOMPLETE_BODY = "incomplete-body"  # 400 IncompleteBody; the server is not asked
    LOST_RESPONSE = "lost-response"  # the server has done it, and its answer does not arrive
    TRUNCATED = "truncated"  # half of the answer's body arrives
    FLIPPED_UPLOAD = "flipped-upload"  # one bit of the request's body is another one
    FLIPPED_DOWNLOAD = "flipped-download"  # one bit of the answer's body is another one


_REFUSALS: Final = {
    HttpFault.SLOW_DOWN: (503, "SlowDown", "Please reduce your request rate."),
    HttpFault.SERVER_ERROR: (500, "InternalError", "We encountered an internal error. Please try again."),
    HttpFault.DENIED: (403, "AccessDenied", "Access Denied"),
    HttpFault.EXPIRED: (400, "ExpiredToken", "The provided token has expired."),
    HttpFault.INCOMPLETE_BODY: (400, "IncompleteBody", "The request body terminated unexpectedly."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """What has come by: ``path`` with the query, ``nbytes`` of body, what befell it."""

    method: str
    path: str
    headers: dict[str, str]
    nbytes: int
    fault: HttpFault | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRule:
    """Which requests a fault befalls.

    Of those that match, it befalls a ``share``, drawn at random, or each ``every``-th, the first one first; at most
    ``times``, None: no limit. ``methods`` None: of any method; ``path``: a glob over path and query; ``min_nbytes``: of
    body; ``delay_s``: of `HttpFault.DELAY` and `HttpFault.HANG`.
    """

    fault: HttpFault
    share: float = 1.0
    methods: frozenset[str] | None = None
    path: str = "*"
    min_nbytes: int = 0
    every: int = 1
    times: int | None = None
    delay_s: float = 0.0

    def matches(self, request: HttpRequest) -> bool:
        return (
            (self.methods is None or request.method in self.methods)
            and fnmatch.fnmatchcase(request.path, self.path)
            and request.nbytes >= self.min_nbytes
        )


class FaultProxy:
    """Passes HTTP requests on to ``upstream``, one fault at most befalling each; a context manager.

    Requests keep their headers, so that what a client has signed stays signed: point the client's endpoint at ``url``.
    Rules are tried in their order, and the first that applies is taken. Draws come from ``seed``; which request gets
    which draw depends on the order of arrival.
    """

    def __init__(self, upstream: str, *rules: HttpRule, seed: int = 0, clock: Clock = SYSTEM_CLOCK) -> None:
        self._plan = _Plan(rules, seed)
        self._server = _Server(urlsplit(upstream).netloc, self._plan, clock)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        """The endpoint that a client is given."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def requests(self) -> list[HttpRequest]:
        """What has come by, in the order of arrival."""
        return self._plan.requests

    @property
    def injected(self) -> Counter[HttpFault]:
        """How often each fault has befallen a request."""
        return Counter(request.fault for request in tuple(self.requests) if request.fault is not None)

    def uploaded_nbytes(self, path: str = "*") -> int:
        """Return how many bytes of request bodies have arrived here, for paths that match, also in vain."""
        return sum(each.nbytes for each in tuple(self.requests) if fnmatch.fnmatchcase(each.path, path))

    def use(self, *rules: HttpRule) -> None:
        """Let other rules hold from now on; none: let everything pass."""
        self._plan.use(rules)

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Reset every connection while this lasts, whatever the rules are."""
        self._plan.away = True
        try:
            yield
        finally:
            self._plan.away = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_TIMEOUT_S)


class _Plan:
    """Which fault befalls which request."""

    def __init__(self, rules: Sequence[HttpRule], seed: int) -> None:
        self._random = Random(seed)  # noqa: S311 -- it draws faults
        self._lock = threading.Lock()
        self._rules = tuple(rules)
        self._matched: Counter[HttpRule] = Counter()
        self._befallen: Counter[HttpRule] = Counter()
        self.away = False
        self.requests: list[HttpRequest] = []

    def use(self, rules: Sequence[HttpRule]) -> None:
        with self._lock:
            self._rules = tuple(rules)
            self._matched.clear()
            self._befallen.clear()

    def decide(self, request: HttpRequest) -> HttpRule | None:
        with self._lock:
            if self.away:
                return HttpRule(fault=HttpFault.RESET)
            return next((rule for rule in self._rules if rule.matches(request) and self._befalls(rule)), None)

    def flip(self, content: bytearray) -> None:
        if content:
            with self._lock:
                bit = self._random.randrange(8 * len(content))
            content[bit // 8] ^= 1 << bit % 8

    def _befalls(self, rule: HttpRule) -> bool:
        turn = self._matched[rule]
        self._matched[rule] += 1
        if turn % rule.every or (rule.share < 1.0 and self._random.random() >= rule.share):
            return False
        if rule.times is not None and self._befallen[rule] >= rule.times:
            return False
        self._befallen[rule] += 1
        return True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, target: str, plan: _Plan, clock: Clock) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.target = target
        self.plan = plan
        self.clock = clock

    def handle_error(self, *arguments: Any) -> None:
        """A client that has hung up is none of ours."""


class _Connection(BaseHTTPRequestHandler):
    """Serves one connection of a client, over one connection of its own."""

    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT_S
    server: _Server
    _upstream: HTTPConnection | None = None

    def do_any(self) -> None:
        nbytes = int(self.headers.get("Content-Length", 0))
        request = HttpRequest(method=self.command, path=self.path, headers=dict(self.headers.items()), nbytes=nbytes)
        rule = self.server.plan.decide(request)
        fault = rule.fault if rule is not None else None
        body = bytearray(self.rfile.read(nbytes // 2 if fault is HttpFault.RESET_IN_BODY else nbytes))
        self.server.plan.requests.append(replace(request, nbytes=len(body), fault=fault))
        if rule is not None and rule.delay_s:
            self.server.clock.sleep(rule.delay_s)
        if fault in (HttpFault.RESET, HttpFault.RESET_IN_BODY, HttpFault.HANG):
            self._reset()
        elif fault in _REFUSALS:
            self._refuse(*_REFUSALS[fault])
        else:
            self._pass_on(body, fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_any  # noqa: N815 -- what http.server looks for

    def finish(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        with suppress(OSError):
            super().finish()

    def _pass_on(self, body: bytearray, fault: HttpFault | None) -> None:
        if fault is HttpFault.FLIPPED_UPLOAD:
            self.server.plan.flip(body)
        try:
            status, headers, content = self._ask(bytes(body))
        except (OSError, HTTPException):
            return self._reset()  # the server is away: so are we
        if fault is HttpFault.LOST_RESPONSE:
            return self._reset()
        if fault is HttpFault.FLIPPED_DOWNLOAD:
            self.server.plan.flip(content)
        truncated = fault is HttpFault.TRUNCATED and bool(content)
        self._say(status, headers, content[: len(content) // 2] if truncated else content)
        return self._reset() if truncated else None

    def _ask(self, body: bytes) -> tuple[int, Sequence[tuple[str, str]], bytearray]:
        """Ask the server, once more over a new connection if the one that was kept has been closed."""
        kept = self._upstream is not None
        if self._upstream is None:
            self._upstream = HTTPConnection(self.server.target, timeout=_TIMEOUT_S)
        try:
            # As it came, the Host too: both are signed.
            self._upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _HOP_BY_HOP:
                    self._upstream.putheader(name, value)
            self._upstream.endheaders(body or None)
            response = self._upstream.getresponse()
            content = bytearray(response.read())
        except (OSError, HTTPException):
            self._upstream.close()
            self._upstream = None
            if kept:
                return self._ask(body)
            raise
        headers = [(name, value) for name, value in response.getheaders() if name.lower() not in _HOP_BY_HOP]
        if not any(name.lower() == "content-length" for name, _ in headers):
            headers.append(("Content-Length", str(len(content))))
        return response.status, headers, content

    def _say(self, status: int, headers: Sequence[tuple[str, str]], content: bytes | bytearray) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: int, code: str, message: str) -> None:
        document = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(document)))]
        self._say(status, headers, b"" if self.command == "HEAD" else document)

    def _reset(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.connection.close()

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""


__all__ = ["FaultProxy", "HttpFault", "HttpRequest", "HttpRule"]
