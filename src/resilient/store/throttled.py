"""How fast uploads may go: so that they leave the network to the training."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol, TypeVar, runtime_checkable

from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.format.digest import BytesLike
from resilient.store.base import Store
from resilient.store.forwarding import Forwarding
from resilient.store.pieces import total

Piece = TypeVar("Piece", bytes, memoryview)


class Bandwidth:
    """So many bytes a second, for all threads and stores that share it.

    Nobody saves up: after a pause one piece goes at once, and the next waits for as long as that one was worth. So the
    rate holds over any span, give or take one piece.
    """

    def __init__(self, bytes_per_s: float, *, clock: Clock = SYSTEM_CLOCK) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"a bandwidth is more than nothing, got {bytes_per_s}")
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at_s = clock.monotonic()

    def wait(self, nbytes: int) -> None:
        """Return when a piece of ``nbytes`` may be sent."""
        if self._bytes_per_s == math.inf:
            return  # without the lock, which a forked child could inherit held
        with self._lock:
            now_s = self._clock.monotonic()
            turn_s = max(self._free_at_s, now_s)
            self._free_at_s = turn_s + nbytes / self._bytes_per_s
        if turn_s > now_s:
            self._clock.sleep(turn_s - now_s)  # outside the lock: those who come later wait side by side

    def paced(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield each piece when it may be sent."""
        for piece in pieces:
            self.wait(len(piece))
            yield piece


UNBOUNDED: Final = Bandwidth(math.inf)
"""Shared because nobody ever waits for it."""


@runtime_checkable
class Throttleable(Protocol):
    """A store that sends large objects piece by piece, and can wait in between."""

    def throttled(self, bandwidth: Bandwidth) -> Store:
        """Return the same store, which sends no piece before `Bandwidth.wait` has returned."""
        ...


def throttled(store: Store, bandwidth: Bandwidth) -> Store:
    """Return ``store`` with bounded uploads: piece by piece where it can, else object by object."""
    return store.throttled(bandwidth) if isinstance(store, Throttleable) else Throttled(store, bandwidth)


class Throttled(Forwarding):
    """A store whose puts wait until there is bandwidth for the whole object. Small documents (`create`) do not wait."""

    def __init__(self, inner: Store, bandwidth: Bandwidth) -> None:
        super().__init__(inner)
        self._bandwidth = bandwidth

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        self._bandwidth.wait(total(parts))
        self._inner.put(key, parts)
