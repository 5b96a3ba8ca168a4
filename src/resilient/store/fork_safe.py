"""A store whose client does not survive a fork: a forked child uses another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Final

from resilient.format.digest import BytesLike
from resilient.store.base import Capabilities, Store
from resilient.store.throttled import Bandwidth, throttled

_HOME: Final = os.getpid()
"""The process that imported this, with the first such store. obstore keeps one set of threads per process, and a child
inherits the belief that they run: the first call there would wait for ever."""


class ForkSafe:
    """The store ``inner``, and in forked children the one that ``in_child`` makes."""

    def __init__(self, inner: Store, in_child: Callable[[], Store]) -> None:
        self._inner = inner
        self._in_child = in_child

    @property
    def inner(self) -> Store:
        return self._inner if os.getpid() == _HOME else self._childs

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def throttled(self, bandwidth: Bandwidth) -> ForkSafe:
        """Return the same store with bounded uploads."""
        return ForkSafe(throttled(self._inner, bandwidth), lambda: throttled(self._in_child(), bandwidth))

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        self.inner.put(key, parts)

    def create(self, key: str, data: bytes) -> bool:
        return self.inner.create(key, data)

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        self.inner.read_into(key, start, into)

    def size(self, key: str) -> int:
        return self.inner.size(key)

    def list(self, prefix: str) -> Iterator[str]:
        return self.inner.list(prefix)

    def folders(self, prefix: str) -> Iterator[str]:
        return self.inner.folders(prefix)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def close(self) -> None:
        if os.getpid() == _HOME:  # a child that has used nothing makes nothing to close it
            self._inner.close()

    @cached_property
    def _childs(self) -> Store:
        return self._in_child()
