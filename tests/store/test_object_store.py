from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from resilient.errors import CorruptError, ErrorKind, StoreError
from resilient.store import aws, object_store, obstore_clients
from resilient.store.base import Store
from resilient.store.object_store import ObjectStore
from resilient.store.retrying import Retrying
from resilient.store.throttled import Bandwidth
from resilient.testing.proxy import FaultProxy, HttpFault, HttpRequest, HttpRule
from tests.s3_server import BUCKET, S3Server
from tests.store.conformance import StoreConformance

pytestmark = pytest.mark.s3

MIB = 1 << 20
REQUEST_BYTES = 5 * MIB  # the smallest part that S3 takes


def connected(server: S3Server, **options: Any) -> ObjectStore:
    prefix = secrets.token_hex(8)
    return ObjectStore(f"s3://{BUCKET}/{prefix}", aws.connect(BUCKET, prefix, {**server.options(), **options}))


class TestObjectStore(StoreConformance):
    @pytest.fixture
    def store(self, s3_server: S3Server) -> Store:
        return connected(s3_server)

    def reopen(self, store: Store) -> Store:
        assert isinstance(store, ObjectStore)
        return ObjectStore(store.url, store._connect)


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "REQUEST_BYTES", REQUEST_BYTES)


@pytest.fixture
def wire(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def store(s3_server: S3Server, wire: FaultProxy) -> ObjectStore:
    return connected(s3_server, endpoint_url=wire.url)


PART: dict[str, Any] = {"methods": frozenset({"PUT"}), "path": "*partNumber*"}
COMPLETION: dict[str, Any] = {"methods": frozenset({"POST"}), "path": "*uploadId*"}
CONTENT: dict[str, Any] = {"methods": frozenset({"PUT"})}
READ: dict[str, Any] = {"methods": frozenset({"GET"})}


def uploads_a_part(request: HttpRequest) -> bool:
    return request.method == "PUT" and "partNumber" in request.path


def puts_an_object(request: HttpRequest) -> bool:
    return request.method == "PUT" and "partNumber" not in request.path


def gets(request: HttpRequest) -> bool:
    return request.method == "GET"


def read(store: Store, key: str, nbytes: int, start: int = 0) -> bytearray:
    into = bytearray(nbytes)
    store.read_into(key, start, memoryview(into))
    return into


def test_large_objects_go_up_in_parts_and_come_down_in_ranges(store: ObjectStore, wire: FaultProxy) -> None:
    content = secrets.token_bytes(3 * REQUEST_BYTES + 17)
    view = memoryview(content)
    store.put("large", [view[:100], view[100 : 7 * MIB], view[7 * MIB :]])
    parts = [request.nbytes for request in wire.requests if uploads_a_part(request)]
    assert sorted(parts) == [17, REQUEST_BYTES, REQUEST_BYTES, REQUEST_BYTES], "whatever the buffers are cut into"
    assert store.size("large") == len(content)
    assert store.get("large") == content
    wire.requests.clear()
    assert read(store, "large", 2 * REQUEST_BYTES + 5, start=MIB) == content[MIB : MIB + 2 * REQUEST_BYTES + 5]
    assert sum(map(gets, wire.requests)) == 3


@pytest.mark.field_report("BR-132")
def test_an_object_of_too_many_parts_gets_larger_ones(
    store: ObjectStore, wire: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_MOST_PARTS", 2)
    content = secrets.token_bytes(3 * REQUEST_BYTES + 1)
    store.put("large", [content])
    assert sum(map(uploads_a_part, wire.requests)) == 2
    assert store.get("large") == content


def test_the_buffers_of_a_put_are_free_when_it_returns(store: ObjectStore) -> None:
    buffer = memoryview(bytearray(20 * MIB))
    store.put("large", [buffer])
    store.put("small", [buffer[:5]])
    buffer.release()  # an error if somebody still held it


def test_every_body_carries_a_checksum_and_is_not_signed_besides(store: ObjectStore, wire: FaultProxy) -> None:
    store.put("small", [b"x"])
    store.put("large", [bytes(REQUEST_BYTES + 1)])
    store.create("claim", b"x")
    bodies = [request.headers for request in wire.requests if request.method == "PUT"]
    assert len(bodies) == 4
    for headers in bodies:
        lower = {name.lower(): value for name, value in headers.items()}
        assert lower["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        assert lower["x-amz-checksum-crc64nvme"]


@pytest.mark.field_report("BR-139")
@pytest.mark.parametrize("nbytes", [1_000, 2 * REQUEST_BYTES], ids=["one request", "parts"])
def test_a_bit_flipped_on_the_way_up_is_refused_and_sent_again(
    store: ObjectStore, wire: FaultProxy, nbytes: int
) -> None:
    content = secrets.token_bytes(nbytes)
    wire.use(HttpRule(fault=HttpFault.FLIPPED_UPLOAD, times=1, **CONTENT))
    with pytest.raises(StoreError, match=r"put of 'key'.*BadDigest") as caught:
        store.put("key", [content])
    assert caught.value.retryable
    assert list(store.list("")) == []
    wire.use(HttpRule(fault=HttpFault.FLIPPED_UPLOAD, times=1, **CONTENT))
    Retrying(store).put("key", [content])
    assert store.get("key") == content


def test_a_bit_flipped_in_a_claim_is_refused_and_sent_again(store: ObjectStore, wire: FaultProxy) -> None:
    wire.use(HttpRule(fault=HttpFault.FLIPPED_UPLOAD, times=1, **CONTENT))
    assert Retrying(store).create("claim", b"mine")
    assert store.get("claim") == b"mine"


@pytest.mark.parametrize("fault", [HttpFault.RESET, HttpFault.RESET_IN_BODY, HttpFault.LOST_RESPONSE])
def test_parts_are_sent_again_one_by_one(store: ObjectStore, wire: FaultProxy, fault: HttpFault) -> None:
    wire.use(HttpRule(fault=fault, every=2, **PART))
    content = secrets.token_bytes(3 * REQUEST_BYTES)
    store.put("large", [content])
    assert store.get("large") == content
    starts = [request for request in wire.requests if request.method == "POST" and "uploads" in request.path]
    assert len(starts) == 1


@pytest.mark.field_report("BR-137")
@pytest.mark.parametrize("fault", [HttpFault.RESET, HttpFault.LOST_RESPONSE, HttpFault.TRUNCATED])
def test_ranges_are_fetched_again_one_by_one(store: ObjectStore, wire: FaultProxy, fault: HttpFault) -> None:
    content = secrets.token_bytes(3 * REQUEST_BYTES)
    store.put("large", [content])
    wire.use(HttpRule(fault=fault, every=2, **READ))
    assert read(store, "large", len(content)) == content
    assert sum(map(gets, wire.requests)) == 6


def test_a_bit_flipped_on_the_way_down_is_for_digests_to_find(store: ObjectStore, wire: FaultProxy) -> None:
    content = secrets.token_bytes(1_000)
    store.put("key", [content])
    wire.use(HttpRule(fault=HttpFault.FLIPPED_DOWNLOAD, **READ))
    assert read(store, "key", 1_000) != content


def test_a_create_whose_answer_was_lost_recognizes_its_own_object(store: ObjectStore, wire: FaultProxy) -> None:
    wire.use(HttpRule(fault=HttpFault.LOST_RESPONSE, times=1, **CONTENT))
    assert Retrying(store).create("claim", b"mine")
    assert sum(map(puts_an_object, wire.requests)) == 2
    assert not store.create("claim", b"theirs")


@pytest.mark.field_report("BR-131")
@pytest.mark.parametrize("denied", [PART, COMPLETION], ids=["a part", "the completion"])
def test_a_large_put_that_fails_leaves_no_object_and_no_parts(
    store: ObjectStore, wire: FaultProxy, s3_server: S3Server, denied: dict[str, Any]
) -> None:
    wire.use(HttpRule(fault=HttpFault.DENIED, **denied))
    with pytest.raises(StoreError, match=r"put of 'large'") as caught:
        store.put("large", [bytes(3 * REQUEST_BYTES)])
    assert caught.value.kind is ErrorKind.ACCESS_DENIED
    assert list(store.list("")) == []
    assert [request.path for request in wire.requests if request.method == "DELETE" and "uploadId" in request.path]


def test_an_object_that_ends_early_is_corrupt_also_when_it_is_large(store: ObjectStore) -> None:
    store.put("short", [bytes(REQUEST_BYTES + 5)])
    with pytest.raises(CorruptError, match=f"ends at byte {REQUEST_BYTES + 5}"):
        read(store, "short", 2 * REQUEST_BYTES)


def test_a_call_ends_though_the_server_never_answers(monkeypatch: pytest.MonkeyPatch, s3_server: S3Server) -> None:
    monkeypatch.setattr(obstore_clients, "REQUEST_TIMEOUT", timedelta(seconds=1))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = connected(s3_server, endpoint_url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        for call in (lambda: store.get("key"), lambda: store.put("key", [b"x"])):
            started = time.monotonic()
            with pytest.raises(StoreError, match=r"of 'key'.*no answer in time") as caught:
                call()
            assert time.monotonic() - started < 10
            assert caught.value.kind is ErrorKind.DEADLINE
            assert caught.value.retryable


def test_a_throttled_store_waits_between_the_parts_of_an_object(store: ObjectStore) -> None:
    content = secrets.token_bytes(4 * REQUEST_BYTES)
    started = time.monotonic()
    store.throttled(Bandwidth(5 * REQUEST_BYTES)).put("large", [content])
    assert time.monotonic() - started >= 0.6, "three parts waited for those before them"
    assert store.get("large") == content
