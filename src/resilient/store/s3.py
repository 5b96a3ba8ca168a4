"""An S3 bucket as a store, through s3fs: for options that only s3fs understands.

s3fs brings session, credentials and event loop; the calls are S3's own. Its file-system view of a bucket (listing
caches, directories, making a bucket that is missing) would guess where a store must know.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from fsspec.asyn import sync
from s3fs import S3FileSystem

from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.errors import CorruptError, ErrorKind, NotFoundError, StoreError
from resilient.format.digest import BytesLike
from resilient.store.base import Capabilities
from resilient.store.keys import checked_key, checked_prefix
from resilient.store.per_process import PerProcess
from resilient.store.pieces import pieces, total
from resilient.store.recognizing import is_ours
from resilient.store.remote_faults import faults, server_code
from resilient.store.retrying import TIMEOUT_S, retry
from resilient.store.throttled import UNBOUNDED, Bandwidth

T = TypeVar("T")

REQUEST_BYTES = 16 << 20
"""The largest body of one request: what is in memory, and what a failure costs."""

REQUEST_TIMEOUT_S = 90.0
"""A request takes no longer, whatever happens: half of a link of 3 Mbit/s would still make it."""

_MOST_PARTS = 10_000  # of one object, says S3
_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 20  # between two packets of an answer


def connect(bucket: str, prefix: str, options: Mapping[str, Any], *, clock: Clock = SYSTEM_CLOCK) -> S3Store:
    """Return the store at ``s3://bucket/prefix``; ``options`` are those of `s3fs.S3FileSystem` and win over ours."""
    config = {
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "read_timeout": _READ_TIMEOUT_S,
        "retries": {"total_max_attempts": 1},  # retries are for one layer, which knows the deadline
        **options.get("config_kwargs", {}),
    }
    # The checksum of every body stays on, and is what finds a flipped bit; signing each body with SHA-256 besides costs
    # more than the upload.
    config["s3"] = {"payload_signing_enabled": False, **config.get("s3", {})}
    filesystem = S3FileSystem(
        **{**options, "config_kwargs": config, "use_listings_cache": False, "skip_instance_cache": True}
    )
    return S3Store(filesystem, bucket, prefix, clock=clock)


class S3Store:
    """Objects below a prefix of a bucket. The bucket is never made.

    Requests move at most `REQUEST_BYTES` and end within `REQUEST_TIMEOUT_S`; larger objects go up in parts and come
    down in ranges, each retried by itself.
    """

    capabilities = Capabilities(conditional_create=True, atomic_put=True, ranged_read=True)

    def __init__(self, filesystem: S3FileSystem, bucket: str, prefix: str = "", *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._filesystem = PerProcess(filesystem)
        self._bucket = bucket
        self._prefix = checked_prefix(f"{prefix}/" if prefix else "")
        self._clock = clock
        self._bandwidth = UNBOUNDED

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def throttled(self, bandwidth: Bandwidth) -> S3Store:
        """Return the same store, which waits for ``bandwidth`` before each part that it sends."""
        other = copy.copy(self)
        other._bandwidth = bandwidth  # noqa: SLF001 -- its own class
        return other

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        nbytes = total(parts)
        if nbytes <= REQUEST_BYTES:
            self._bandwidth.wait(nbytes)
            self._call("put", key, "put_object", Body=b"".join(parts))
        else:
            self._put_in_parts(key, pieces(parts, max(REQUEST_BYTES, -(-nbytes // _MOST_PARTS))))

    def create(self, key: str, data: bytes) -> bool:
        try:
            self._call("create", key, "put_object", Body=data, IfNoneMatch="*")
        except StoreError as error:
            if error.__cause__ is None or not _exists(error.__cause__):
                raise
        else:
            return True
        return is_ours(self, key, data)

    def get(self, key: str) -> bytes:
        start, size = self._fetch("get", key, 0, REQUEST_BYTES)
        if len(start) == size:
            return start  # one request is all that a document costs
        content = bytearray(size)
        self.read_into(key, 0, memoryview(content))
        return bytes(content)

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        view = into.cast("B")
        if view.nbytes == 0:
            self.size(key)  # nothing to read, but a missing object is still an error
        for offset in range(0, view.nbytes, REQUEST_BYTES):
            read = partial(self._read_block, key, start + offset, view[offset : offset + REQUEST_BYTES])
            if view.nbytes <= REQUEST_BYTES:
                read()
            else:
                retry(read, doing=f"read of {key!r} in {self.url}", clock=self._clock, timeout_s=TIMEOUT_S)

    def size(self, key: str) -> int:
        return int(self._call("size", key, "head_object")["ContentLength"])

    def written_at(self, key: str) -> datetime:
        """Return when an object was written, by the server's clock, to the second."""
        moment: datetime = self._call("time", key, "head_object")["LastModified"]
        return moment

    def list(self, prefix: str) -> Iterator[str]:
        for page in self._pages(prefix):
            for entry in page.get("Contents", ()):
                key: str = entry["Key"].removeprefix(self._prefix)
                if not key.endswith("/"):  # how consoles mark a folder
                    yield key

    def folders(self, prefix: str) -> Iterator[str]:
        skipped = len(self._prefix + prefix)
        for page in self._pages(prefix, Delimiter="/"):
            for entry in page.get("CommonPrefixes", ()):
                yield entry["Prefix"][skipped:-1]

    def delete(self, key: str) -> None:
        with suppress(NotFoundError):
            self._call("delete", key, "delete_object")

    def close(self) -> None:
        """Connections belong to the process's event loop and go with it."""

    def _call(self, verb: str, key: str, method: str, **arguments: Any) -> Mapping[str, Any]:
        with faults(f"{verb} of {key!r}", self.url, reads=method in {"head_object", "delete_object"}):
            answer: Mapping[str, Any] = self._send(_answer, method, Key=self._prefix + checked_key(key), **arguments)
            return answer

    def _send(self, request: Callable[..., Awaitable[T]], method: str, **arguments: Any) -> T:
        filesystem = self._filesystem.get()
        filesystem.retries = 1  # as in `connect`
        arguments["Bucket"] = self._bucket
        sent: T = sync(filesystem.loop, request, filesystem, method, arguments, timeout=REQUEST_TIMEOUT_S)
        return sent

    def _fetch(self, verb: str, key: str, start: int, nbytes: int) -> tuple[bytes, int]:
        """Return up to ``nbytes`` of an object and its size."""
        arguments = {"Key": self._prefix + checked_key(key), "Range": f"bytes={start}-{start + nbytes - 1}"}
        with faults(f"{verb} of {key!r}", self.url, reads=True):
            try:
                return self._send(_answer_and_body, "get_object", **arguments)
            except OSError as error:
                code, status = server_code(error)
                if code != "InvalidRange" and status != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                    raise
        return b"", self.size(key)  # the range starts behind the end, as every range of an empty object does

    def _read_block(self, key: str, start: int, into: memoryview) -> None:
        end = start + into.nbytes
        body, size = self._fetch("read", key, start, into.nbytes)
        if len(body) == into.nbytes:
            into[:] = body
        elif size < end:
            message = f"object {key!r} in {self.url} ends at byte {size}; bytes {start} to {end} are wanted"
            raise CorruptError(message, kind=ErrorKind.MALFORMED)
        else:
            message = f"read of {key!r} in {self.url}: {len(body)} bytes came where {into.nbytes} were due"
            raise StoreError(message, kind=ErrorKind.IO, retryable=True)

    def _put_in_parts(self, key: str, bodies: Iterator[bytes]) -> None:
        upload = self._call("put", key, "create_multipart_upload")["UploadId"]
        try:
            done = []
            for number, body in enumerate(self._bandwidth.paced(bodies), 1):
                doing = f"put of part {number} of {key!r} in {self.url}"
                send = partial(self._call, "put", key, "upload_part", UploadId=upload, PartNumber=number, Body=body)
                done.append(_part(number, retry(send, doing=doing, clock=self._clock, timeout_s=TIMEOUT_S)))
            self._call("put", key, "complete_multipart_upload", UploadId=upload, MultipartUpload={"Parts": done})
        except BaseException:
            with suppress(
                StoreError, NotFoundError
            ):  # parts that stay cost money; a lifecycle rule finds those of the killed
                self._call("put", key, "abort_multipart_upload", UploadId=upload)
            raise

    def _pages(self, prefix: str, **arguments: Any) -> Iterator[Mapping[str, Any]]:
        arguments["Prefix"] = self._prefix + checked_prefix(prefix)
        while True:
            with faults(f"list of {prefix!r}", self.url):
                page: Mapping[str, Any] = self._send(_answer, "list_objects_v2", **arguments)
            yield page
            if not page.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = page["NextContinuationToken"]


async def _answer(filesystem: S3FileSystem, method: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    call = filesystem._call_s3  # noqa: SLF001 -- fsspec names the asynchronous variant of `call_s3` like that
    answer: Mapping[str, Any] = await call(method, **arguments)
    return answer


async def _answer_and_body(filesystem: S3FileSystem, method: str, arguments: Mapping[str, Any]) -> tuple[bytes, int]:
    """Return the bytes of a range and the size of the whole object."""
    answer = await _answer(filesystem, method, arguments)
    async with answer["Body"] as stream:
        body: bytes = await stream.read()
    return body, int(answer["ContentRange"].rpartition("/")[2])


def _part(number: int, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what completing an upload must say of one part: S3 wants the checksums back that it gave."""
    checksums = {
        name: value for name, value in answer.items() if name.startswith("Checksum") and name != "ChecksumType"
    }
    return {"PartNumber": number, "ETag": answer["ETag"], **checksums}


def _exists(error: BaseException) -> bool:
    code, status = server_code(error)
    return code == "PreconditionFailed" or status == HTTPStatus.PRECONDITION_FAILED
