"""A writer inside the trainer's process, for stores that no other process can open."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final

from resilient.clock import SYSTEM_CLOCK, Clock, Deadline
from resilient.errors import ErrorKind, PeerError
from resilient.store.base import Store
from resilient.writer.at_exit import before_threads_end
from resilient.writer.link import tell
from resilient.writer.messages import Abandon, Answer, Close, Died, Open, Order, Save, Structure
from resilient.writer.serving import Serving
from resilient.writer.slot import Slot
from resilient.writer.tiering import Tiering
from resilient.writer.worker import Worker


class ThreadWriter:
    """Does what a writer process does, and ends with the trainer: not before what was ordered is done, unless killed.

    A `WriterLink`. ``heard`` gets the answers, one at a time, on a thread of this object. A program that ends waits for
    no longer than a commit may take.
    """

    def __init__(
        self,
        store: Store,
        opened: Open,
        slots: Sequence[Slot],
        heard: Callable[[Answer], None],
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._rank = opened.rank
        self._timeout_s = opened.commit_timeout_s
        self._clock = clock
        self._heard = heard
        self._ordering = threading.Lock()
        self._closed = False
        self._death: str | None = None
        self._over = threading.Event()
        self._answers: SimpleQueue[Answer | None] = SimpleQueue()
        worker = Worker(store, opened, slots, self._answers.put, clock=clock)
        tiering = Tiering(opened, slots, clock=clock) if opened.tiers else None
        self._serving = Serving(worker, self._answers.put, tiering=tiering)
        # Daemons: one that hangs must not keep the program from ending. `_close_all` waits for all others.
        self._threads = [
            threading.Thread(target=self._work, name=f"resilient-writer-{opened.rank}", daemon=True),
            threading.Thread(target=self._hear, name=f"resilient-heard-{opened.rank}", daemon=True),
        ]
        _working.add(self)
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        return not self._closed and not self._over.is_set()

    def wait_ready(self, timeout_s: float) -> None:
        """Return at once: the store is open already."""

    def define(self, structure: Structure) -> None:
        self._take(structure)

    def save(self, order: Save) -> None:
        self._take(order)

    def abandon(self, step: int, why: str) -> None:
        self._take(Abandon(step=step, why=why))

    def kill(self) -> None:
        """Leave the thread behind: none can be ended. What it still says is not heard any more."""
        self._end(f"the writer of rank {self._rank}, a thread, hangs and was left behind")
        self._serving.take(Close())

    def close(self, timeout_s: float) -> bool:
        with self._ordering:
            if not self._closed:
                self._closed = True
                self._serving.take(Close())
        deadline = Deadline(self._clock, timeout_s)
        for thread in self._threads:
            thread.join(deadline.remaining_s)
        return not any(thread.is_alive() for thread in self._threads)

    def close_at_exit(self) -> None:
        """Finish what was ordered, as far as there is time for it."""
        self.close(self._timeout_s)

    def _take(self, order: Order) -> None:
        with self._ordering:  # what is ordered before it dies is followed by `Died`
            if self._closed or self._death is not None:
                what = self._death or f"the writer of rank {self._rank}, a thread, takes no orders any more"
                raise PeerError(what, kind=ErrorKind.PEER_FAILED)
            self._serving.take(order)

    def _work(self) -> None:
        try:
            self._serving.run()
        except BaseException as error:
            self._end(f"the writer of rank {self._rank}, a thread, was ended by {type(error).__name__}: {error}")
            raise
        else:
            self._end(None)

    def _end(self, death: str | None) -> None:
        """Let nothing be heard any more, but why; what ends it first counts."""
        with self._ordering:
            if self not in _working:
                return
            _working.discard(self)
            self._death = death
            if death is not None:
                self._answers.put(Died(why=death))
            self._answers.put(None)

    def _hear(self) -> None:
        while (answer := self._answers.get()) is not None:
            tell(self._heard, answer)
        self._over.set()


_working: Final[set[ThreadWriter]] = set()
"""Those that have not ended, nor were left behind."""


def _close_all() -> None:
    for each in list(_working):
        each.close_at_exit()


before_threads_end(_close_all)
os.register_at_fork(after_in_child=_working.clear)  # threads do not cross a fork
