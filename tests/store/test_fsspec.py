from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from resilient.errors import ErrorKind, NotFoundError, StoreError
from resilient.store import fsspec_store
from resilient.store.base import Store
from resilient.store.fsspec_store import FsspecStore
from tests.store.conformance import StoreConformance


class TestLocalFileSystem(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FsspecStore(LocalFileSystem(), str(tmp_path / "run"))

    def reopen(self, store: Store) -> Store:
        return FsspecStore(LocalFileSystem(), store.url.removeprefix("file://"))


class TestMemoryFileSystem(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return FsspecStore(MemoryFileSystem(), f"/{secrets.token_hex(8)}/run")


class TestAsynchronousFileSystem(StoreConformance):
    many = 100

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FsspecStore(AsyncFileSystemWrapper(LocalFileSystem()), str(tmp_path / "run"))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_store, "_BLOCK_BYTES", 1_000)


@pytest.mark.usefixtures("small_blocks")
def test_large_objects_go_and_come_in_blocks(tmp_path: Path) -> None:
    content = secrets.token_bytes(12_345)
    for filesystem in (LocalFileSystem(), MemoryFileSystem()):
        store = FsspecStore(filesystem, str(tmp_path / "run"))
        store.put("large", [content[:5], memoryview(content)[5:7_000], content[7_000:]])
        into = bytearray(11_000)
        store.read_into("large", 345, memoryview(into))
        assert into == content[345:11_345]
        assert store.get("large") == content


def test_nothing_is_promised_that_fsspec_does_not() -> None:
    capabilities = FsspecStore(MemoryFileSystem(), "/run").capabilities
    assert not capabilities.conditional_create
    assert not capabilities.atomic_put


def failing(error: Exception) -> AbstractFileSystem:
    class Failing(AbstractFileSystem):  # type: ignore[misc]
        protocol = "failing"

        def fail(self, *arguments: Any, **options: Any) -> Any:
            raise error

        pipe_file = cat_file = info = find = ls = rm_file = open = fail

    return Failing(skip_instance_cache=True)


class EndpointConnectionError(Exception):
    """Named like botocore's."""


class ClientError(Exception):
    """Shaped like botocore's."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(f"server said {code}")
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


@pytest.mark.field_report("BR-131")
@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        (ClientError("NoSuchBucket", 404), ErrorKind.NO_SUCH_BUCKET, False),
        (ClientError("InvalidAccessKeyId", 403), ErrorKind.BAD_CREDENTIALS, False),
        (ClientError("SignatureDoesNotMatch", 403), ErrorKind.BAD_CREDENTIALS, False),
        (ClientError("ExpiredToken", 400), ErrorKind.BAD_CREDENTIALS, False),
        (ClientError("AccessDenied", 403), ErrorKind.ACCESS_DENIED, False),
        (ClientError("SlowDown", 503), ErrorKind.THROTTLED, True),
        (ClientError("", 503), ErrorKind.THROTTLED, True),
        (ClientError("InternalError", 500), ErrorKind.IO, True),
        (ClientError("IncompleteBody", 400), ErrorKind.IO, True),
        (ClientError("BadDigest", 400), ErrorKind.IO, True),
        (ClientError("ConditionalRequestConflict", 409), ErrorKind.IO, True),
        (ClientError("EntityTooLarge", 400), ErrorKind.IO, False),
        (ClientError("SomethingNew", 400), ErrorKind.IO, False),
        (EndpointConnectionError("no route"), ErrorKind.UNREACHABLE, True),
        (ConnectionResetError("reset"), ErrorKind.UNREACHABLE, True),
        (TimeoutError(), ErrorKind.DEADLINE, True),
        (PermissionError("no"), ErrorKind.ACCESS_DENIED, False),
        (OSError(28, "No space left on device"), ErrorKind.NO_SPACE, False),
        (OSError(5, "Input/output error"), ErrorKind.IO, True),
        (ValueError("odd"), ErrorKind.IO, False),
    ],
    ids=lambda value: str(value) if isinstance(value, Exception) else None,
)
def test_errors_of_clients_are_classified_and_name_call_key_and_place(
    error: Exception, kind: ErrorKind, retryable: bool
) -> None:
    store = FsspecStore(failing(error), "bucket/run", url="x://bucket/run")
    calls: dict[str, Callable[[], object]] = {
        "get of 'a/key'": lambda: store.get("a/key"),
        "put of 'a/key'": lambda: store.put("a/key", [b"x"]),
        "size of 'a/key'": lambda: store.size("a/key"),
        "read of 'a/key'": lambda: store.read_into("a/key", 0, memoryview(bytearray(1))),
        "list of 'a/'": lambda: list(store.list("a/")),
        "delete of 'a/key'": lambda: store.delete("a/key"),
    }
    for doing, call in calls.items():
        with pytest.raises(StoreError) as caught:
            call()
        assert (caught.value.kind, caught.value.retryable) == (kind, retryable)
        assert str(caught.value).startswith(f"{doing} in x://bucket/run failed: ")
        assert caught.value.__cause__ is error


def test_only_a_read_may_find_an_object_absent() -> None:
    store = FsspecStore(failing(ClientError("404", 404)), "bucket/run")
    with pytest.raises(NotFoundError):
        store.get("key")
    for call in (lambda: store.put("key", [b"x"]), lambda: list(store.list(""))):
        with pytest.raises(StoreError) as caught:
            call()
        assert caught.value.kind is ErrorKind.NO_SUCH_BUCKET


@pytest.mark.field_report("BR-137")
def test_a_body_that_comes_short_is_tried_again(tmp_path: Path) -> None:
    class Cutting(LocalFileSystem):  # type: ignore[misc]
        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
            content: bytes = super().cat_file(path, start=start, end=end, **options)
            return content[:-1]

    store = FsspecStore(Cutting(), str(tmp_path))
    store.put("key", [b"0123456789"])
    with pytest.raises(StoreError, match="4 bytes came where 5 were due") as caught:
        store.read_into("key", 0, memoryview(bytearray(5)))
    assert caught.value.retryable


@pytest.mark.usefixtures("small_blocks")
def test_a_large_put_that_fails_half_way_publishes_nothing() -> None:
    published: list[int] = []

    class HalfWay(AbstractBufferedFile):  # type: ignore[misc]
        def _upload_chunk(self, final: bool = False) -> bool:
            published.extend([self.tell()] if final else [])
            if self.tell() > 2_000:
                raise OSError(5, "Input/output error")
            return True

        def discard(self) -> None:
            published.append(-1)

    class Filesystem(MemoryFileSystem):  # type: ignore[misc]
        def open(self, path: str, mode: str = "rb", **options: Any) -> MemoryFile:
            return HalfWay(self, path, mode, size=None, **options)

    with pytest.raises(StoreError):
        FsspecStore(Filesystem(), "/run").put("large", [b"x" * 10_000])
    assert published == [-1]


def test_a_call_of_an_asynchronous_filesystem_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(AsyncFileSystem):  # type: ignore[misc]
        protocol = "hanging"

        async def _cat_file(self, path: str, *arguments: Any, **options: Any) -> bytes:
            await asyncio.sleep(3_600)
            return b""

    monkeypatch.setattr(fsspec_store, "_CALL_TIMEOUT_S", 0.2)
    with pytest.raises(StoreError) as caught:
        FsspecStore(Hanging(), "run").get("key")
    assert caught.value.kind is ErrorKind.DEADLINE
    assert caught.value.retryable
