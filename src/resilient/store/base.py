"""What a store is: named bytes in places, by few verbs, with declared capabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, runtime_checkable

from resilient.format.digest import BytesLike


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a store promises beyond keeping bytes.

    ``conditional_create``: of several `Store.create` calls for one key exactly one wins, also between machines.
    ``atomic_put``: a reader sees an object whole or not at all. ``ranged_read``: reading a part transfers that part
    only.
    Reads are fastest when several run at once, each of ``request_nbytes``, and each of whole units of ``unit_nbytes``
    (but for the end of an object) to memory that begins on a multiple of that.
    """

    conditional_create: bool
    atomic_put: bool
    ranged_read: bool
    request_nbytes: int = 16 << 20
    unit_nbytes: int = 1


@runtime_checkable
class Store(Protocol):
    """Bytes under keys (``a/b/c``), inside one place.

    Every call is durable when it returns, ends within a deadline, may be called from any thread, and raises only
    `StoreError` (with ``retryable``), or `NotFoundError` (kind ``no-such-object``) where said.
    """

    @property
    def url(self) -> str:
        """The place, as a person would type it; never with credentials."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        """Store an object whose content is ``parts`` back to back, replacing what was there."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Store an object unless there is one; say whether the object that is there now is ours.

        "Ours" means that its content equals ``data`` (callers put a nonce in): a retry after a lost response finds its
        own write and recognizes it.
        """
        ...

    def get(self, key: str) -> bytes:
        """Return a whole (small) object; raise `NotFoundError`."""
        ...

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        """Fill ``into`` from ``start`` on; raise `NotFoundError`, or `CorruptError` if the object is shorter."""
        ...

    def size(self, key: str) -> int:
        """Return the number of bytes of an object; raise `NotFoundError`."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """Yield all keys below ``prefix`` (empty, or ending in ``/``), in no order; may be stale: it only proposes."""
        ...

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the next component of all keys that have another ``/`` after ``prefix``; only proposes."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""
        ...

    def close(self) -> None:
        """Give connections and threads back. Idempotent."""
        ...


@runtime_checkable
class Sweepable(Protocol):
    """A store in which killed writers leave what no listing shows."""

    def sweep(self, before: datetime) -> int:
        """Remove what was never published, if nobody has written to it since ``before``; return how much there was."""
        ...
