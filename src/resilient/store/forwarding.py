"""What a wrapper of a store does with the verbs that it has nothing to add to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from resilient.format.digest import BytesLike
from resilient.store.base import Capabilities, Store


class Forwarding:
    """Hands every verb on to ``inner``; a wrapper defines again what it changes."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    @property
    def inner(self) -> Store:
        return self._inner

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        self._inner.put(key, parts)

    def create(self, key: str, data: bytes) -> bool:
        return self._inner.create(key, data)

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        self._inner.read_into(key, start, into)

    def size(self, key: str) -> int:
        return self._inner.size(key)

    def list(self, prefix: str) -> Iterator[str]:
        return self._inner.list(prefix)

    def folders(self, prefix: str) -> Iterator[str]:
        return self._inner.folders(prefix)

    def delete(self, key: str) -> None:
        self._inner.delete(key)

    def close(self) -> None:
        self._inner.close()
