"""The memory of this process as a store."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Final

from resilient.errors import ErrorKind, NotFoundError
from resilient.format.digest import BytesLike
from resilient.store.base import Capabilities
from resilient.store.keys import checked_key, checked_prefix
from resilient.store.whole import copy_range, folders_of

_named: Final[dict[str, MemoryStore]] = {}
_named_lock: Final = threading.Lock()


class MemoryStore:
    """Objects in a dictionary: for tests and notebooks. Nothing outlives the process."""

    capabilities = Capabilities(conditional_create=True, atomic_put=True, ranged_read=True)

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        content = b"".join(parts)
        with self._lock:
            self._objects[checked_key(key)] = content

    def create(self, key: str, data: bytes) -> bool:
        with self._lock:
            return self._objects.setdefault(checked_key(key), bytes(data)) == data

    def get(self, key: str) -> bytes:
        with self._lock:
            try:
                return self._objects[checked_key(key)]
            except KeyError:
                raise NotFoundError(
                    f"there is no object {key!r} in {self.url}", kind=ErrorKind.NO_SUCH_OBJECT
                ) from None

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        copy_range(self.get(key), start, into, key=key, url=self.url)

    def size(self, key: str) -> int:
        return len(self.get(key))

    def list(self, prefix: str) -> Iterator[str]:
        checked_prefix(prefix)
        with self._lock:
            keys = list(self._objects)
        return (key for key in keys if key.startswith(prefix))

    def folders(self, prefix: str) -> Iterator[str]:
        return folders_of(self.list(prefix), prefix)

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(checked_key(key), None)

    def close(self) -> None:
        """Nothing to give back: the objects stay, another handle on the same place may be in use."""


def shared_memory_store(name: str) -> MemoryStore:
    """Return the one store of that name in this process."""
    with _named_lock:
        return _named.setdefault(name, MemoryStore(name))
