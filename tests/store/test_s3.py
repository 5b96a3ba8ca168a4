from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fsspec.exceptions import FSTimeoutError

from resilient.errors import ErrorKind, StoreError
from resilient.store import s3
from resilient.store.base import Store
from resilient.store.open import open_store
from resilient.store.retrying import Retrying
from resilient.store.s3 import S3Store
from tests.s3_server import BUCKET, S3Server
from tests.store.conformance import StoreConformance

pytestmark = pytest.mark.s3

Request = Callable[..., Awaitable[Any]]


def connected(server: S3Server, user: str = "owner", **options: Any) -> S3Store:
    chosen = {"client": "fsspec", **server.options(user), **options}
    store = open_store(server.fresh_url(), storage_options=chosen).inner
    assert isinstance(store, S3Store)
    return store


@pytest.fixture(scope="module")
def filesystem(s3_server: S3Server) -> Any:
    return connected(s3_server)._filesystem.get()  # one client for many tests: making one takes a while


@pytest.fixture
def store(filesystem: Any) -> S3Store:
    return S3Store(filesystem, BUCKET, secrets.token_hex(8))


class TestS3Store(StoreConformance):
    @pytest.fixture
    def store(self, filesystem: Any) -> Store:
        return S3Store(filesystem, BUCKET, secrets.token_hex(8))

    def reopen(self, store: Store) -> Store:
        assert isinstance(store, S3Store)
        return S3Store(store._filesystem.get(), BUCKET, store._prefix.rstrip("/"))


@pytest.fixture
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "REQUEST_BYTES", 5 << 20)  # the smallest part that S3 takes


def test_large_objects_go_up_in_parts_and_come_down_in_ranges(store: S3Store, small_requests: None) -> None:
    content = secrets.token_bytes((12 << 20) + 17)
    store.put("large", [content[:100], memoryview(content)[100 : 6 << 20], content[6 << 20 :]])
    assert store.size("large") == len(content)
    assert store.get("large") == content
    into = bytearray(11 << 20)
    store.read_into("large", 1 << 20, memoryview(into))
    assert into == content[1 << 20 : 12 << 20]


def test_every_body_carries_a_checksum_and_is_not_signed_besides(store: S3Store) -> None:
    sent: list[dict[str, bytes]] = []
    filesystem = store._filesystem.get()
    filesystem.connect()
    watch = lambda request, **_: sent.append(dict(request.headers))
    filesystem.s3.meta.events.register("before-send.s3", watch)
    store.put("key", [b"x"])
    store.create("claim", b"x")
    filesystem.s3.meta.events.unregister("before-send.s3", watch)
    assert len(sent) == 2
    for headers in sent:
        lower = {name.lower(): value for name, value in headers.items()}
        assert lower["x-amz-content-sha256"].startswith((b"UNSIGNED-PAYLOAD", b"STREAMING-UNSIGNED-PAYLOAD"))
        assert any(name.startswith(("x-amz-checksum", "x-amz-trailer")) for name in lower)


class Interrupted:
    """Stands before a function that sends; fails every second call of some methods, before or after it works."""

    def __init__(self, request: Request, *, after: bool, methods: frozenset[str], error: Exception) -> None:
        self.request, self.after, self.methods, self.error = request, after, methods, error
        self.calls = 0

    async def __call__(self, filesystem: Any, method: str, arguments: Any) -> Any:
        self.calls += method in self.methods
        fails = method in self.methods and self.calls % 2 == 1
        if fails and not self.after:
            raise self.error
        answer = await self.request(filesystem, method, arguments)
        if fails:
            raise self.error
        return answer


@pytest.mark.parametrize(
    ("after", "error"),
    [(False, ConnectionResetError("reset")), (True, FSTimeoutError())],
    ids=["request lost", "answer lost"],
)
def test_parts_and_ranges_are_retried_one_by_one(
    store: S3Store, small_requests: None, monkeypatch: pytest.MonkeyPatch, after: bool, error: Exception
) -> None:
    methods = frozenset({"upload_part", "get_object"})
    send = Interrupted(s3._answer, after=after, methods=methods, error=error)
    fetch = Interrupted(s3._answer_and_body, after=after, methods=methods, error=error)
    monkeypatch.setattr(s3, "_answer", send)
    monkeypatch.setattr(s3, "_answer_and_body", fetch)
    content = secrets.token_bytes(12 << 20)
    store.put("large", [content])
    assert send.calls == 6, "three parts, each sent twice"
    into = bytearray(len(content))
    store.read_into("large", 0, memoryview(into))
    assert into == content
    assert fetch.calls >= 6


def test_a_create_whose_answer_was_lost_recognizes_its_own_object(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Interrupted(s3._answer, after=True, methods=frozenset({"put_object"}), error=ConnectionResetError("reset"))
    monkeypatch.setattr(s3, "_answer", send)
    assert Retrying(store).create("claim", b"mine")
    assert send.calls == 2
    monkeypatch.undo()
    assert not store.create("claim", b"theirs")


def test_a_large_put_that_fails_leaves_no_object_and_no_parts(
    store: S3Store, small_requests: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = PermissionError("denied")
    send = Interrupted(s3._answer, after=False, methods=frozenset({"complete_multipart_upload"}), error=denied)
    monkeypatch.setattr(s3, "_answer", send)
    with pytest.raises(StoreError, match="put of 'large'"):
        store.put("large", [bytes(12 << 20)])
    assert list(store.list("")) == []
    uploads = store._filesystem.get().call_s3("list_multipart_uploads", Bucket=BUCKET, Prefix=store.url.split("/")[-1])
    assert not uploads.get("Uploads")


def test_a_call_ends_though_the_server_never_answers(monkeypatch: pytest.MonkeyPatch, s3_server: S3Server) -> None:
    monkeypatch.setattr(s3, "REQUEST_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_store = connected(s3_server, endpoint_url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(StoreError, match="get of 'key'") as caught:
            silent_store.get("key")
        assert time.monotonic() - started < 10
        assert caught.value.kind is ErrorKind.DEADLINE
        assert caught.value.retryable
