"""Making a staged state durable: data objects first, then the receipt that says what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from resilient.catalog.commit import write_receipt
from resilient.catalog.generations import newest_number
from resilient.catalog.line import read_chain
from resilient.catalog.once import exists
from resilient.catalog.prune import give_up
from resilient.clock import Clock
from resilient.errors import ConflictError, ErrorKind, ResilientError, StoreError
from resilient.format.chunks import Chunks, Places
from resilient.format.documents import Object, Receipt
from resilient.format.layout import Attempt
from resilient.store.base import Store
from resilient.store.throttled import Bandwidth, throttled
from resilient.writer.compressing import Compressing
from resilient.writer.freshness import Freshness
from resilient.writer.messages import Open, Save
from resilient.writer.outline import Digests, Outline
from resilient.writer.packing import Load, as_staged, encoded
from resilient.writer.run_queue import RunQueue
from resilient.writer.sharing import Sharing, Stored
from resilient.writer.slot import Slot

_NOT_WRITTEN: Final = "a rank could not write its data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A save that was ordered: which attempt it is, how it is cut into pieces, and the slot that holds it."""

    order: Save
    attempt: Attempt
    outline: Outline
    slot: Slot

    def check(self) -> None:
        """Raise unless the slot holds this state, whole.

        Asked before the first byte is read and after the last one is written: the memory is shared, and what the other
        side does with it in between is not ours to know.
        """
        stamp, attempt = self.slot.stamp, self.attempt
        expected = (self.order.sequence, attempt.generation, attempt.step)
        if not stamp.whole or (stamp.sequence, stamp.generation, stamp.step) != expected:
            raise ConflictError(
                f"{attempt} is not what slot {self.order.slot} holds: it was staged over before it was durable",
                kind=ErrorKind.SAVE_FAILED,
                hint="nothing of it counts; the next save is made as usual",
            )


class Persister:
    """Makes one state after another durable, as one rank's part of a checkpoint."""

    def __init__(
        self, store: Store, opened: Open, *, clock: Clock, orphaned: Callable[[], bool] = lambda: False
    ) -> None:
        """``orphaned`` says whether the trainer is gone, so that a later life may be at work."""
        self._orphaned = orphaned
        self._unfinished: list[Attempt] = []
        self._store = store
        self._data = store
        if opened.max_bandwidth is not None:
            self._data = throttled(store, Bandwidth(opened.max_bandwidth, clock=clock))
        self._opened = opened
        self._clock = clock
        self._sharing = Sharing(store)
        self._compressing = Compressing(opened, clock=clock)
        self._freshness = Freshness()
        self.changed: bool | None = None
        """Whether what the last save should have changed differs from the save before; None: nothing to compare."""

    def persist(self, staged: Staged) -> int:
        """Write what this rank stores, then its receipt; return the bytes of data written.

        Pieces that another rank stores are only listed, with a digest where they were staged, so that the commit can
        compare. If the data cannot be written, what was written of it is removed again and the attempt is given up.
        """
        tried: list[Object] = []
        try:
            places, objects = self._write(staged, tried)
            staged.check()
        except ResilientError as error:
            # A store that is away can remove nothing, and trying would take long again.
            if not (isinstance(error, StoreError) and error.retryable):
                self._withdraw(staged.attempt, tried)
            raise
        order, outline, attempt = staged.order, staged.outline, staged.attempt
        write_receipt(self._store, receipt_of(self._opened, staged, objects, places))
        stored = Stored(objects=objects, places=places.take(outline.mine))
        self.changed = self._freshness.look(outline, places.digest, order.trained)
        self._sharing.persisted(attempt, outline, places.digest, stored, full=len(objects) == len(tried))
        return sum(each.nbytes for each in tried)

    def committed(self, attempt: Attempt) -> None:
        """Let later saves refer to what this one has stored."""
        self._sharing.committed(attempt)

    def give_up_older(self, attempt: Attempt) -> None:
        """Give up what could not be written, and was left to the tiers, before this one was committed."""
        with suppress(ResilientError):  # a later life collects what stays
            while self._unfinished and not self._orphaned():
                older = self._unfinished[-1]
                if not exists(self._store, older.commit):
                    chain = read_chain(self._store, [older, attempt])
                    give_up(self._store, older, self._clock, reason=_NOT_WRITTEN, chain=chain)
                self._unfinished.pop()

    def _write(self, staged: Staged, tried: list[Object]) -> tuple[Places, tuple[Object, ...]]:
        """Store what is not stored yet; return where everything lies, and in which objects."""
        staged.slot.refresh()
        staged.check()
        outline, payload = staged.outline, staged.slot.payload
        with ThreadPoolExecutor(1, thread_name_prefix="resilient-digest") as beside:
            digesting: Future[Digests] = beside.submit(outline.digests, payload)
            same: npt.NDArray[np.bool_] = np.zeros(len(outline.mine), bool)
            if self._sharing.hopes(outline):
                same = self._sharing.find(staged.attempt, outline, digesting.result())
            pieces = outline.mine[~same]
            level = self._compressing.level(outline, payload, pieces)
            plain = level is None and not same.any()
            loads = as_staged(outline, payload, pieces) if level is None else encoded(outline, payload, pieces, level)
            # Under the names of whole, raw objects the tiers of the node hold them, and must hold the same.
            first = 0 if plain or not self._opened.tiers else len(outline.structure.objects)
            written = self._send(staged.attempt, loads, tried, first)
            places = placed(outline.places(digesting.result()), written)
        objects = tuple(tried)
        if same.any():
            places, objects = _referring(places, objects, outline.mine[same], self._sharing.stored, same)
        return places, objects

    def _send(self, attempt: Attempt, loads: Iterable[Load], tried: list[Object], first: int) -> Sequence[Load]:
        """Store one object after another, numbered from ``first``; ``tried`` lists each from before its first byte."""
        written = []
        duration_s, waited_s = 0.0, 0.0
        for part, load in enumerate(loads, first):
            each = Object(key=attempt.data(self._opened.rank, part), nbytes=int(load.nbytes.sum()))
            tried.append(each)
            started_s, queue = self._clock.monotonic(), RunQueue()
            self._data.put(each.key, load.parts)
            duration_s += self._clock.monotonic() - started_s
            waited_s += queue.waited_s()
            written.append(replace(load, parts=()))  # the memory goes as soon as it is sent
        self._compressing.sent(sum(each.nbytes for each in tried), duration_s, waited_s=waited_s)
        return written

    def _withdraw(self, attempt: Attempt, objects: Sequence[Object]) -> None:
        """Free what a rank has written of an attempt for which it will never write a receipt.

        So it cannot be committed. The TOMBSTONE lets retention remove what the other ranks have written of it, without
        waiting for a restart. Where there are tiers, they may have the state whole, and a later life commit it with
        objects of these very names: it is given up after the next commit, and no data goes that such a life may need.
        """
        with suppress(StoreError):  # the error that led here is the one to tell; a later life collects what stays
            if self._opened.tiers:
                if self._orphaned() or newest_number(self._store) > attempt.generation:
                    return
                if exists(self._store, attempt.commit):
                    return
                self._unfinished.append(attempt)
            for each in objects:
                self._store.delete(each.key)
            if not self._opened.tiers:
                give_up(self._store, attempt, self._clock, reason=_NOT_WRITTEN)


def receipt_of(opened: Open, staged: Staged, objects: tuple[Object, ...], places: Places) -> Receipt:
    """Return what one rank says of a state: all that it holds, and where its part is stored."""
    attempt, outline = staged.attempt, staged.outline
    return Receipt(
        step=attempt.step,
        generation=attempt.generation,
        nonce=attempt.nonce,
        rank=opened.rank,
        world_size=opened.world_size,
        items=outline.structure.items,
        tensors=outline.structure.tensors,
        objects=objects,
        chunks=Chunks(outline.boxes, places),
        values=staged.order.values,
    )


def placed(places: Places, written: Sequence[Load]) -> Places:
    """Return where the pieces lie after they were stored in these objects."""
    object_, start, nbytes, codec = (
        np.array(column) for column in (places.object, places.start, places.nbytes, places.codec)
    )
    for part, load in enumerate(written):
        object_[load.pieces] = part
        start[load.pieces] = np.cumsum(load.nbytes) - load.nbytes
        nbytes[load.pieces] = load.nbytes
        codec[load.pieces] = load.codec
    return replace(places, object=object_, start=start, nbytes=nbytes, codec=codec)


def _referring(
    places: Places,
    objects: tuple[Object, ...],
    pieces: npt.NDArray[np.int64],
    base: Stored,
    same: npt.NDArray[np.bool_],
) -> tuple[Places, tuple[Object, ...]]:
    """Return ``places`` with these pieces where an earlier save has stored them, and its objects after ``objects``."""
    theirs = base.places.take(same)
    used, number = np.unique(theirs.object, return_inverse=True)
    places.object[pieces] = len(objects) + number
    places.start[pieces] = theirs.start
    places.nbytes[pieces] = theirs.nbytes
    places.codec[pieces] = theirs.codec
    return places, (*objects, *(base.objects[each] for each in used.tolist()))
