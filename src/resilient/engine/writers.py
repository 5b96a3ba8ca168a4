"""The writer that a rank has now: started, replaced when it is gone, and told every structure before its first save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from resilient.clock import Clock
from resilient.errors import PeerError, ResilientError
from resilient.store.base import Store
from resilient.store.open import recipe
from resilient.writer.in_thread import ThreadWriter
from resilient.writer.link import WriterLink
from resilient.writer.messages import Answer, Open, Save, Structure
from resilient.writer.process import ProcessWriter
from resilient.writer.slot import Slot

_START_TIMEOUT_S: Final = 60.0


class Writers:
    """One writer at a time; calls may come from any thread.

    A process where another process can open the store, which then outlives this one; else a thread.
    """

    def __init__(
        self,
        store: Store,
        opened: Open,
        slots: Sequence[Slot],
        heard: Callable[[int, Answer], None],
        *,
        notice: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self._store = store
        self._opened = opened
        self._slots = slots
        self._heard = heard
        self._notice = notice
        self._clock = clock
        self._lock = threading.Lock()
        self._defined: set[int] = set()
        self._number = 0  # of the writer that there is; a late word of another must not be taken for its
        self._link = self._start()

    def wait_ready(self, timeout_s: float) -> None:
        """Return when the writer has shown that it works; if no process can be had, a thread does its work.

        Raises:
            ResilientError: the writer says why it cannot work: the store does not open there.
        """
        with self._lock:
            link = self._link
        try:
            link.wait_ready(timeout_s)
        except PeerError as error:
            self._notice(f"saves are written by a thread and end with this process: {error}")
            with self._lock:
                link.close(0)
                self._link = self._thread_writer()

    def order(self, structure: Structure, order: Save, *, by: Callable[[int], object]) -> None:
        """Order a save of the writer, or of a new one if that one is gone; tell ``by`` its number before.

        Raises:
            ResilientError: neither took the order.
        """
        with self._lock:
            if self._link.alive:
                try:
                    self._give(structure, order, by)
                except PeerError:
                    pass  # it has just gone: the next one gets the order
                else:
                    return
            self._link = self._start()
            self._link.wait_ready(_START_TIMEOUT_S)
            self._give(structure, order, by)

    def abandon(self, step: int, why: str) -> None:
        """Tell the writer that another rank's part of a step will not come; one that is gone need not know."""
        with self._lock:
            if self._link.alive:
                try:
                    self._link.abandon(step, why)
                except ResilientError:
                    return  # it has just gone, which it says itself

    def kill(self) -> None:
        """End a writer that hangs; it says `Died` for what it had in hand."""
        with self._lock:
            self._link.kill()

    def close(self, timeout_s: float) -> bool:
        """Let the writer finish and go; say whether it has."""
        with self._lock:
            return self._link.close(timeout_s)

    def _give(self, structure: Structure, order: Save, by: Callable[[int], object]) -> None:
        by(self._number)
        if structure.number not in self._defined:
            self._link.define(structure)
            self._defined.add(structure.number)
        self._link.save(order)

    def _start(self) -> WriterLink:
        self._defined.clear()
        self._number += 1
        described = recipe(self._store)
        if described is None:
            return self._thread_writer()
        opened = msgspec.structs.replace(self._opened, url=described.url, options=dict(described.options))
        try:
            return ProcessWriter(opened, self._slots, partial(self._heard, self._number))
        except PeerError as error:
            self._notice(f"saves are written by a thread and end with this process: {error}")
            return self._thread_writer()

    def _thread_writer(self) -> WriterLink:
        self._defined.clear()
        self._number += 1
        heard = partial(self._heard, self._number)
        return ThreadWriter(self._store, self._opened, self._slots, heard, clock=self._clock)
