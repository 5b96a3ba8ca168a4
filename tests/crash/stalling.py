"""A store that stops the process at a chosen operation and says so, for a test that then kills it there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from resilient.format.digest import BytesLike
from resilient.store.base import Capabilities, Store

MOMENTS = (
    "before data",
    "after data",
    "before receipt",
    "after receipt",
    "before manifest",
    "after manifest",
    "before commit",
    "after commit",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Stop at the ``number``-th time (from 1) that ``moment`` comes, having written the file ``signal``."""

    moment: str
    number: int
    signal: Path


def stall(signal: Path) -> None:
    """Tell the test, and never go on."""
    signal.touch()
    time.sleep(600)
    raise AssertionError("nobody killed this process")


class StallingStore:
    """Passes everything on to another store until it is time to stop."""

    def __init__(self, inner: Store, plan: Stall | None) -> None:
        self._inner = inner
        self._plan = plan
        self._seen = 0

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        self._at("before", key)
        self._inner.put(key, parts)
        self._at("after", key)

    def create(self, key: str, data: bytes) -> bool:
        self._at("before", key)
        ours = self._inner.create(key, data)
        self._at("after", key)
        return ours

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

    def _at(self, side: str, key: str) -> None:
        if self._plan is None or f"{side} {_part(key)}" != self._plan.moment:
            return
        self._seen += 1
        if self._seen == self._plan.number:
            stall(self._plan.signal)


def _part(key: str) -> str:
    if key.startswith("data/"):
        return "data"
    name = key.rpartition("/")[2]
    if "/receipts/" in key:
        return "receipt"
    return "manifest" if name.startswith("manifest-") else "commit" if name == "COMMIT" else "other"
