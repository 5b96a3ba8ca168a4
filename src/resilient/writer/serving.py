"""How orders become work: they are taken as they come, and carried out one after another."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

from resilient.writer.messages import Abandon, Answer, Close, Order, Save, Structure, Taken
from resilient.writer.worker import Worker

_LOOK_S: Final = 1.0


class Serving:
    """One thread gives the orders to `take`, another is lent to `run`."""

    def __init__(self, worker: Worker, say: Callable[[Answer], None]) -> None:
        self._worker = worker
        self._say = say
        self._orders: SimpleQueue[Structure | Save | Close] = SimpleQueue()

    def take(self, order: Order) -> None:
        """Take an order; never waits for the work on earlier ones."""
        match order:
            case Abandon():
                self._worker.abandon(order.step, order.why)
            case Save():
                self._say(Taken(step=order.step))
                self._orders.put(order)
            case Structure() | Close():
                self._orders.put(order)

    def run(self, wanted: Callable[[], bool]) -> None:
        """Carry out orders until `Close` is the next, or there is none and ``wanted`` says that none will come."""
        while True:
            try:
                order = self._orders.get(timeout=_LOOK_S)
            except Empty:
                if wanted():
                    continue
                return
            match order:
                case Structure():
                    self._worker.define(order)
                case Save():
                    self._worker.save(order)
                case Close():
                    return
