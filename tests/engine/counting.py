"""A store that counts what is read through it."""

from __future__ import annotations

from resilient.store.base import Store


class CountingStore:
    """Passes everything on; ``documents`` and ``data`` are the bytes read whole and by range."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.documents = 0
        self.data = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def get(self, key: str) -> bytes:
        content = self._inner.get(key)
        self.documents += len(content)
        return content

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        self._inner.read_into(key, start, into)
        self.data += len(into)
