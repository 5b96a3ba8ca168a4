from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from resilient.testing.proxy import FaultProxy, HttpFault, HttpRule

CONTENT = bytes(range(250)) * 40


class Origin:
    """A server that keeps what is PUT, and gives it back."""

    def __init__(self) -> None:
        kept: dict[str, bytes] = {}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_PUT(self) -> None:
                kept[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
                self._say(b"")

            def do_GET(self) -> None:
                self._say(kept.get(self.path, b""))

            def _say(self, content: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments: Any) -> None:
                """Quiet."""

        self.kept = kept
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def origin() -> Iterator[Origin]:
    origin = Origin()
    thread = threading.Thread(target=origin.server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield origin
    origin.server.shutdown()
    origin.server.server_close()
    thread.join(10)


@pytest.fixture
def proxy(origin: Origin) -> Iterator[FaultProxy]:
    with FaultProxy(origin.url, seed=20261201) as proxy:
        yield proxy


def ask(proxy: FaultProxy, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection(proxy.url.removeprefix("http://"), timeout=20)
    try:
        connection.request(method, path, body)
        response: HTTPResponse = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_what_no_rule_befalls_passes_as_it_is(proxy: FaultProxy) -> None:
    assert ask(proxy, "PUT", "/a?part=1", CONTENT) == (200, b"")
    assert ask(proxy, "GET", "/a?part=1") == (200, CONTENT)
    assert [(each.method, each.path, each.nbytes, each.fault) for each in proxy.requests] == [
        ("PUT", "/a?part=1", len(CONTENT), None),
        ("GET", "/a?part=1", 0, None),
    ]
    assert proxy.uploaded_nbytes("/a*") == len(CONTENT)
    assert not proxy.injected


@pytest.mark.parametrize("fault", [HttpFault.RESET, HttpFault.RESET_IN_BODY, HttpFault.HANG])
def test_a_reset_request_never_reaches_the_server(proxy: FaultProxy, origin: Origin, fault: HttpFault) -> None:
    proxy.use(HttpRule(fault=fault, delay_s=0.05, times=1))
    with pytest.raises((OSError, HTTPException)):
        ask(proxy, "PUT", "/a", CONTENT)
    assert not origin.kept
    assert proxy.injected == {fault: 1}
    assert ask(proxy, "PUT", "/a", CONTENT) == (200, b"")


def test_a_lost_response_is_one_of_a_request_that_was_carried_out(proxy: FaultProxy, origin: Origin) -> None:
    proxy.use(HttpRule(fault=HttpFault.LOST_RESPONSE))
    with pytest.raises((OSError, HTTPException)):
        ask(proxy, "PUT", "/a", CONTENT)
    assert origin.kept == {"/a": CONTENT}


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (HttpFault.SLOW_DOWN, 503, b"SlowDown"),
        (HttpFault.SERVER_ERROR, 500, b"InternalError"),
        (HttpFault.DENIED, 403, b"AccessDenied"),
        (HttpFault.EXPIRED, 400, b"ExpiredToken"),
        (HttpFault.INCOMPLETE_BODY, 400, b"IncompleteBody"),
    ],
)
def test_a_refusal_says_what_an_s3_server_would(
    proxy: FaultProxy, origin: Origin, fault: HttpFault, status: int, code: bytes
) -> None:
    proxy.use(HttpRule(fault=fault))
    got, document = ask(proxy, "PUT", "/a", CONTENT)
    assert got == status
    assert code in document
    assert not origin.kept


def test_one_bit_of_the_body_differs(proxy: FaultProxy, origin: Origin) -> None:
    def differing(one: bytes, other: bytes) -> int:
        return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))

    proxy.use(HttpRule(fault=HttpFault.FLIPPED_UPLOAD, methods=frozenset({"PUT"})))
    ask(proxy, "PUT", "/a", CONTENT)
    assert differing(origin.kept["/a"], CONTENT) == 1
    proxy.use(HttpRule(fault=HttpFault.FLIPPED_DOWNLOAD))
    assert differing(ask(proxy, "GET", "/a")[1], origin.kept["/a"]) == 1


def test_half_of_the_answer_arrives(proxy: FaultProxy, origin: Origin) -> None:
    origin.kept["/a"] = CONTENT
    proxy.use(HttpRule(fault=HttpFault.TRUNCATED))
    with pytest.raises((OSError, HTTPException)):
        ask(proxy, "GET", "/a")


def test_rules_choose_by_method_path_size_turn_and_number(proxy: FaultProxy) -> None:
    rule = HttpRule(
        fault=HttpFault.SLOW_DOWN, methods=frozenset({"PUT"}), path="*data*", min_nbytes=100, every=2, times=2
    )
    proxy.use(rule)
    others = [("GET", "/data", None), ("PUT", "/other", CONTENT), ("PUT", "/data", CONTENT[:99])]
    assert [ask(proxy, *each)[0] for each in others] == [200, 200, 200]
    assert [ask(proxy, "PUT", "/data", CONTENT)[0] for _ in range(6)] == [503, 200, 503, 200, 200, 200]


def test_a_share_of_the_requests_is_drawn_with_the_seed(proxy: FaultProxy) -> None:
    proxy.use(HttpRule(fault=HttpFault.SLOW_DOWN, share=0.2))
    befallen = [ask(proxy, "GET", "/a")[0] for _ in range(200)].count(503)
    assert 20 <= befallen <= 62, "seed 20261201"


def test_in_an_outage_nobody_answers_and_afterwards_all_is_well(proxy: FaultProxy) -> None:
    with proxy.outage(), pytest.raises((OSError, HTTPException)):
        ask(proxy, "GET", "/a")
    assert ask(proxy, "GET", "/a")[0] == 200


def test_a_delay_is_one(proxy: FaultProxy) -> None:
    proxy.use(HttpRule(fault=HttpFault.DELAY, delay_s=0.2))
    started = time.monotonic()
    assert ask(proxy, "GET", "/a")[0] == 200
    assert time.monotonic() - started >= 0.2


def test_a_server_that_is_gone_looks_gone(origin: Origin) -> None:
    with FaultProxy("http://127.0.0.1:9") as proxy, pytest.raises((OSError, HTTPException)):
        ask(proxy, "GET", "/a")
