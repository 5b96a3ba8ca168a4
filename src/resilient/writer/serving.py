"""How orders become work: they are taken as they come, and carried out one after another."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue

from resilient.writer.messages import Abandon, Answer, Close, Order, Save, Structure, Taken
from resilient.writer.worker import Worker


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

    def run(self) -> None:
        """Carry out orders until `Close` is the next."""
        while True:
            match order := self._orders.get():
                case Structure():
                    self._worker.define(order)
                case Save():
                    self._worker.save(order)
                case Close():
                    return
