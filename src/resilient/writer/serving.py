"""How orders become work: they are taken as they come, and carried out one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, TypeAlias

from resilient.writer.messages import Abandon, Answer, Close, Order, Save, Structure, Taken
from resilient.writer.tiering import Tiering
from resilient.writer.worker import Worker

_LAST_S: Final = 30.0
_Orders: TypeAlias = SimpleQueue[Structure | Save | Close]


class Serving:
    """One thread gives the orders to `take`, another is lent to `run`.

    What goes to the tiers of the node has a thread and a queue of its own: it takes a moment, and must not wait for a
    store that takes minutes, nor keep a save waiting.
    """

    def __init__(self, worker: Worker, say: Callable[[Answer], None], *, tiering: Tiering | None = None) -> None:
        self._worker = worker
        self._say = say
        self._tiering = tiering
        self._orders: _Orders = SimpleQueue()
        self._near: _Orders = SimpleQueue()

    def take(self, order: Order) -> None:
        """Take an order; never waits for the work on earlier ones."""
        match order:
            case Abandon():
                self._worker.abandon(order.step, order.why)
            case Save():
                self._say(Taken(step=order.step))
                if order.tiers and self._tiering is not None:
                    self._near.put(order)
                if order.stores:
                    self._orders.put(order)
            case Structure() | Close():
                if self._tiering is not None:
                    self._near.put(order)
                self._orders.put(order)

    def run(self) -> None:
        """Carry out orders until `Close` is the next."""
        beside = None if self._tiering is None else threading.Thread(target=self._tier, args=(self._tiering,))
        if beside is not None:
            beside.name, beside.daemon = "resilient-tiers", True
            beside.start()
        try:
            self._store()
        finally:
            if beside is not None:
                beside.join(_LAST_S)  # a disk that hangs must not keep the process

    def _store(self) -> None:
        while True:
            match order := self._orders.get():
                case Structure():
                    self._worker.define(order)
                case Save():
                    self._worker.save(order)
                case Close():
                    return

    def _tier(self, tiering: Tiering) -> None:
        while True:
            match order := self._near.get():
                case Structure():
                    tiering.define(order)
                case Save():
                    self._say(tiering.save(order))
                case Close():
                    tiering.close()
                    return
