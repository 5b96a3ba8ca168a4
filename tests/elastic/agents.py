"""Agents without torch and without workers: several of them in one process, over one store."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from resilient.clock import SYSTEM_CLOCK
from resilient.elastic.conf import Conf
from resilient.elastic.documents import Agent, Closed
from resilient.elastic.joining import Joining
from resilient.elastic.ledger import Ledger
from resilient.elastic.liveness import Listener
from resilient.elastic.membership import Asking, Membership, News, Self
from resilient.elastic.node import Node
from resilient.store.base import Store
from tests.elastic.test_rounds import AGREEMENT

QUICK = Conf(
    join_timeout=30.0,
    last_call_timeout=0.5,
    survivors_timeout=10.0,
    resize_timeout=4.0,
    deaf_timeout=0.5,
    ping_timeout=1.0,
    poll_interval=0.1,
    exit_timeout=90.0,
)

_numbers = itertools.count(1)


class FakeAgent:
    """One agent: it listens, joins, watches and waits as a real one does; `kill` leaves nothing but what it wrote."""

    def __init__(
        self,
        store: Store,
        folder: Path,
        *,
        least: int = 1,
        most: int = 9,
        conf: Conf = QUICK,
        rdzv_id: str = "job",
        **described: Any,
    ) -> None:
        number = next(_numbers)
        nonce = f"{number:016x}"
        news = News()
        listener = Listener(nonce, news.tell)
        directory = folder / nonce
        directory.mkdir(parents=True)
        made = Agent(
            nonce=nonce,
            host=f"host{number}",
            pid=number,
            addresses=("127.0.0.1",),
            port=listener.port,
            store_port=0,
            agreement=AGREEMENT,
            created=f"2026-01-01T{number:08d}",
        )
        self.me = Self(
            agent=msgspec.structs.replace(made, **described),
            ledger=Ledger(store, rdzv_id),
            node=Node(directory),
            conf=conf,
            clock=SYSTEM_CLOCK,
            least=least,
            most=most,
            listener=listener,
            news=news,
        )
        self.membership: Membership | None = None
        self.killed = threading.Event()

    @property
    def nonce(self) -> str:
        return self.me.nonce

    def form(self, *, look: bool = True) -> Closed:
        """Form the next round, as torchelastic's call for one does; ``look``: go on looking at it in a thread."""
        previous = self.membership
        if previous is not None and previous.reform is None:
            previous.reform = "the test says so"
        self.me.node.clear()
        joining = Joining(
            self.me,
            previous=previous,
            start_store=lambda: 1,
            asking=lambda: previous.asking if previous else Asking(),
            stopped=self._check,
        )
        closed = joining.form()
        self.membership = Membership(self.me, closed)
        self.membership.local_workers = 1
        if look:
            self.membership.start()
        if previous is not None:
            previous.close()
        return closed

    def start(self, **how: Any) -> Future[Closed]:
        """Form a round in a thread."""
        return in_thread(lambda: self.form(**how))

    def kill(self) -> None:
        self.killed.set()
        self.me.listener.close()
        if self.membership is not None:
            self.membership.close()

    def _check(self) -> None:
        if self.killed.is_set():
            raise KilledError


class KilledError(Exception):
    pass


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 -- thread main: the future has it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
