"""Keeping the newest states near: written to the tiers of this node, where they survive the processes that made them.

A tier holds what the store would hold, under the same keys, but for what counts for all: it has no COMMIT. Whether a
state is complete is asked of the receipts of all nodes when somebody wants to continue from it.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from resilient.clock import Clock
from resilient.errors import ResilientError, StoreError
from resilient.format import layout
from resilient.format.documents import Object
from resilient.format.layout import Attempt
from resilient.format.receipts import encode_receipt
from resilient.store.base import Store
from resilient.store.local import LocalStore
from resilient.store.throttled import UNBOUNDED, Bandwidth
from resilient.writer.copying import Sending
from resilient.writer.messages import Copied, Open, Save, Structure, Tier, Tiered
from resilient.writer.outline import Digests, Outline
from resilient.writer.packing import as_staged
from resilient.writer.persisting import Staged, placed, receipt_of
from resilient.writer.slot import Slot

_STRUCTURES: Final = 32


def open_tier(tier: Tier) -> LocalStore:
    """Return a tier as the store that it is."""
    return LocalStore(tier.path, volatile=tier.volatile)


class Tiering:
    """Writes the states of one rank and one generation to the tiers of its node; not for several threads.

    A tier that fails costs its copy of that state, and nothing else.
    """

    def __init__(
        self, opened: Open, slots: Sequence[Slot], *, say: Callable[[Copied], None] | None = None, clock: Clock
    ) -> None:
        """``say`` hears what becomes of copies to another node; without it none are made."""
        self._opened = opened
        self._slots = slots
        self._tiers = [(each, open_tier(each)) for each in opened.tiers]
        self._outlines: dict[int, Outline] = {}
        self._pending: Attempt | None = None  # the newest that is written here, and perhaps not everywhere
        self._sending: Sending | None = None
        if say is not None and opened.copies:
            bandwidth = UNBOUNDED if opened.max_bandwidth is None else Bandwidth(opened.max_bandwidth, clock=clock)
            self._sending = Sending(self._tiers[0][1], say, rank=opened.rank, bandwidth=bandwidth, clock=clock)

    def define(self, structure: Structure) -> None:
        """Learn a structure, for the states that follow."""
        self._outlines[structure.number] = Outline(structure)
        while len(self._outlines) > _STRUCTURES:
            del self._outlines[next(iter(self._outlines))]

    def save(self, order: Save) -> Tiered:
        """Write a state to every tier; return what became of it. Raises nothing."""
        attempt = Attempt(step=order.step, generation=self._opened.generation, nonce=self._opened.nonce)
        began_s = _cpu_s()
        written: list[str] = []
        faults: list[str] = []
        nbytes = 0
        try:
            outline = self._outlines.pop(order.structure)
            self._outlines[order.structure] = outline  # the one that was used last
            staged = Staged(order=order, attempt=attempt, outline=outline, slot=self._slots[order.slot])
            staged.slot.refresh()
            staged.check()
            digests = outline.digests(staged.slot.payload)
        except Exception as error:  # noqa: BLE001 -- boundary: whatever is wrong, the store's own save says so as well
            faults.append(_told(error))
        else:
            for tier, store in self._tiers:
                self._forget(store, order.complete)
                try:
                    _write(store, self._opened, staged, digests)
                except Exception as error:  # noqa: BLE001 -- boundary: the other tiers and the store do not depend on it
                    faults.append(f"{tier.name}: {_told(error)}")
                    _remove(store, attempt, self._opened.rank)
                else:
                    written.append(tier.name)
            if self._sending is not None and order.copy_to is not None and self._tiers[0][0].name in written:
                self._sending.send(attempt, order.copy_to)
            nbytes = outline.stored_nbytes
            self._pending = attempt
        return Tiered(
            step=order.step,
            slot=order.slot,
            nbytes=nbytes,
            cpu_s=_cpu_s() - began_s,
            written=tuple(written),
            faults=tuple(faults),
        )

    def close(self) -> None:
        """Give back what is held. What is written stays."""
        for _, store in self._tiers:
            store.close()

    def _forget(self, store: Store, complete: int | None) -> None:
        """Remove what no start would take any more, of all ranks that have written here.

        Never the newest state that is complete on all ranks. Of the newest here it is decided whether it is that one:
        else no further one would have been ordered.
        """
        with suppress(StoreError):  # it is looked for again at the next state
            forget(store, lambda attempt: self._is_over(attempt, complete))

    def _is_over(self, attempt: Attempt, complete: int | None) -> bool:
        mine = self._opened.generation
        if attempt.generation != mine:  # what this one continues from is in the store
            return attempt.generation < mine and (complete is not None or self._pending is not None)
        if self._pending is None:
            return False
        kept = self._pending.step if complete is None else complete
        return attempt.step <= max(kept, self._pending.step) and attempt.step != kept


def forget(store: Store, over: Callable[[Attempt], bool]) -> None:
    """Remove the attempts that are over from a tier: receipts first, so that none is left that promises anything."""
    for key in _keys(store, layout.STEPS):
        parsed = layout.parse_attempt(key)
        if parsed is not None and over(parsed[0]):
            store.delete(key)
    for key in _keys(store, layout.DATA):
        attempt = layout.parse_data(key)
        if attempt is not None and over(attempt):
            store.delete(key)


def _keys(store: Store, prefix: str) -> Iterator[str]:
    return iter(list(store.list(prefix)))


def _write(store: Store, opened: Open, staged: Staged, digests: Digests) -> None:
    """Write data, then the receipt; what was there of this very step goes first, for it may be another state."""
    attempt, outline = staged.attempt, staged.outline
    store.delete(attempt.receipt(opened.rank))
    objects = []
    loads = []
    for part, load in enumerate(as_staged(outline, staged.slot.payload, outline.mine)):
        each = Object(key=attempt.data(opened.rank, part), nbytes=int(load.nbytes.sum()))
        store.put(each.key, load.parts)
        objects.append(each)
        loads.append(load)
    staged.check()
    receipt = receipt_of(opened, staged, tuple(objects), placed(outline.places(digests), loads))
    store.put(attempt.receipt(opened.rank), [encode_receipt(receipt)])


def _remove(store: Store, attempt: Attempt, rank: int) -> None:
    """Free what a rank has written of a state that it could not write whole."""
    with suppress(StoreError):
        store.delete(attempt.receipt(rank))
        for key in _keys(store, layout.DATA):
            if layout.parse_data(key) == attempt and layout.parse_rank(key) == rank:
                store.delete(key)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, ResilientError) else f"{type(error).__name__}: {error}"


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_THREAD)
    return used.ru_utime + used.ru_stime
