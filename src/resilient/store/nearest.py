"""Reading from the nearest place: a tier of this node if it holds the very bytes, else the store."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np

from resilient.errors import CorruptError, ErrorKind, NotFoundError, StoreError
from resilient.format import layout
from resilient.format.digest import digest
from resilient.format.documents import Receipt
from resilient.format.layout import Attempt
from resilient.format.receipts import decode_receipt
from resilient.store.base import Store
from resilient.store.forwarding import Forwarding

_BUFFER_NBYTES: Final = 1 << 20


class Held(Protocol):
    """What is asked of a tier."""

    def get(self, key: str) -> bytes: ...

    def read_into(self, key: str, start: int, into: memoryview) -> None: ...

    def delete(self, key: str) -> None: ...


class Shards:
    """The data objects that one tier holds, as its receipts tell; an object is compared with its digests before use."""

    def __init__(self, name: str, store: Held, *, notice: Callable[[str], None]) -> None:
        self.name = name
        self.store = store
        self._notice = notice
        self._receipts: dict[tuple[Attempt, int], Receipt | None] = {}
        self._verified: dict[str, bool] = {}
        self._lock = threading.Lock()
        self._checking: dict[str, threading.Lock] = {}

    def receipt(self, attempt: Attempt, rank: int) -> Receipt | None:
        """Return what this tier holds of a rank's part; None if that is nothing, or not readable."""
        known = (attempt, rank)
        with self._lock:
            if known not in self._receipts:
                self._receipts[known] = self._read_receipt(attempt, rank)
            return self._receipts[known]

    def holds(self, key: str) -> bool:
        """Say whether a data object is here, whole and right; removes one that is wrong."""
        with self._lock:
            checking = self._checking.setdefault(key, threading.Lock())
        with checking:  # of those who want one object, one looks
            if key not in self._verified:
                self._verified[key] = self._verify(key)
            return self._verified[key]

    def distrust(self, key: str) -> None:
        """Take note that an object is of no use."""
        with self._lock:
            checking = self._checking.setdefault(key, threading.Lock())
        with checking:  # not while another thread finds it to be right
            self._verified[key] = False

    def _read_receipt(self, attempt: Attempt, rank: int) -> Receipt | None:
        key = attempt.receipt(rank)
        try:
            found = decode_receipt(self.store.get(key), key)
        except (NotFoundError, StoreError):
            return None
        except CorruptError as error:
            self._notice(f"{self.name} holds a damaged receipt, which is not used: {error}")
            return None
        return found if (found.attempt, found.rank) == (attempt, rank) else None

    def _verify(self, key: str) -> bool:
        attempt, rank = layout.parse_data(key), layout.parse_rank(key)
        receipt = None if attempt is None or rank is None else self.receipt(attempt, rank)
        if receipt is None:
            return False
        numbers = [number for number, each in enumerate(receipt.objects) if each.key == key]
        if not numbers:
            return False
        try:
            self._compare(receipt, numbers[0])
        except (NotFoundError, StoreError):
            return False
        except CorruptError as error:
            self._notice(f"{self.name} holds a damaged copy of {key}, which is removed: {error}")
            self._remove(key)
            return False
        return True

    def _compare(self, receipt: Receipt, number: int) -> None:
        """Raise `CorruptError` unless every chunk of an object is what the receipt says; tiers hold them raw."""
        places, key = receipt.chunks.places, receipt.objects[number].key
        rows = np.flatnonzero(places.object == number)
        buffer = memoryview(bytearray(max(_BUFFER_NBYTES, int(places.nbytes[rows].max(initial=0)))))
        for row in rows.tolist():
            into = buffer[: int(places.nbytes[row])]
            self.store.read_into(key, int(places.start[row]), into)
            if int(places.codec[row]) or digest(into) != places.digest[row].tobytes():
                raise CorruptError(f"the digest at byte {int(places.start[row])} differs", kind=ErrorKind.BAD_DIGEST)

    def _remove(self, key: str) -> None:
        try:
            self.store.delete(key)
        except StoreError:
            return  # nobody uses it all the same


class NearestStore(Forwarding):
    """A store that serves data objects from the nearest of some tiers that has them, and everything else itself.

    What is served from where is counted: `served` by key and source.
    """

    def __init__(self, inner: Store, tiers: Sequence[Shards]) -> None:
        super().__init__(inner)
        self._tiers = tuple(tiers)
        self._lock = threading.Lock()
        self._served: Counter[tuple[str, str]] = Counter()

    @property
    def served(self) -> dict[tuple[str, str], int]:
        """How many bytes of which data object were read from where."""
        with self._lock:
            return dict(self._served)

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        if layout.parse_data(key) is None:
            self._inner.read_into(key, start, into)
            return
        source = self._read_near(key, start, into)
        if source is None:
            self._inner.read_into(key, start, into)
        with self._lock:
            self._served[key, source or self._inner.url] += into.nbytes

    def distrust(self, key: str) -> None:
        """Take a data object from the store alone from now on: what a tier holds is not what the checkpoint names."""
        for tier in self._tiers:
            tier.distrust(key)

    def _read_near(self, key: str, start: int, into: memoryview) -> str | None:
        for tier in self._tiers:
            if tier.holds(key):
                try:
                    tier.store.read_into(key, start, into)
                except (NotFoundError, CorruptError, StoreError):
                    tier.distrust(key)  # it was there a moment ago; the store has it
                else:
                    return tier.name
        return None
