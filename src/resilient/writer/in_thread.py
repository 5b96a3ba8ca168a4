"""A writer inside the trainer's process, for stores that no other process can open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from resilient.clock import SYSTEM_CLOCK, Clock, Deadline
from resilient.store.base import Store
from resilient.writer.messages import Abandon, Answer, Close, Died, Open, Order, Save, Structure
from resilient.writer.serving import Serving
from resilient.writer.slot import Slot
from resilient.writer.worker import Worker


class ThreadWriter:
    """Does what a writer process does, and ends with the trainer: not before what was ordered is done, unless killed.

    A `WriterLink`. ``heard`` gets the answers, one at a time, on a thread of this object.
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
        self._clock = clock
        self._heard = heard
        self._closed = False
        self._answers: SimpleQueue[Answer | None] = SimpleQueue()
        worker = Worker(store, opened, slots, self._answers.put, clock=clock)
        self._serving = Serving(worker, self._answers.put)
        # Not daemons: a program that ends without waiting still gets its save.
        self._threads = [
            threading.Thread(target=self._work, name=f"resilient-writer-{opened.rank}"),
            threading.Thread(target=self._hear, name=f"resilient-heard-{opened.rank}"),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        return not self._closed

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
        if not self._closed:
            self._closed = True
            self._serving.take(Close())
            self._answers.put(Died(why=f"the writer of rank {self._rank}, a thread, hangs and was left behind"))
            self._answers.put(None)

    def close(self, timeout_s: float) -> bool:
        if not self._closed:
            self._closed = True
            self._serving.take(Close())
        deadline = Deadline(self._clock, timeout_s)
        for thread in self._threads:
            thread.join(deadline.remaining_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _take(self, order: Order) -> None:
        assert not self._closed, "nothing is ordered after close()"
        self._serving.take(order)

    def _work(self) -> None:
        try:
            # Once the interpreter waits for its threads nobody orders anything: it would wait for this one for ever.
            self._serving.run(threading.main_thread().is_alive)
        finally:
            self._answers.put(None)

    def _hear(self) -> None:
        while (answer := self._answers.get()) is not None:
            self._heard(answer)
