"""How a writer process lives: deaf to signals, last in line for the processor, and longer than its trainer."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from resilient.clock import SYSTEM_CLOCK
from resilient.store.open import open_store
from resilient.writer.copying import Receiving
from resilient.writer.messages import Answer, Close, Noticed, Open, Ready, Save, Taken
from resilient.writer.presence import Presence
from resilient.writer.serving import Serving
from resilient.writer.slot import Slot
from resilient.writer.tiering import Tiering, open_tier
from resilient.writer.wire import ORDERS, Wire
from resilient.writer.worker import Worker

DEAF: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What ends a trainer, or a whole job, must not take the save with it that has just been staged."""

_NICE: Final = 10
_GC_THRESHOLD: Final = 1_000_000
_SEND_TIMEOUT_S: Final = 30.0
_END_S: Final = 4.0


def main(arguments: Sequence[str]) -> int:
    """Serve the trainer that started this process until it closes or dies, then finish what it ordered.

    The arguments are made by `resilient.writer.process`, for people who look at a list of processes too:
    ``rank 3 of process 1234 files 5,6,7``, the files being the connection and the slots.
    """
    faulthandler.enable()
    for number in DEAF:
        signal.signal(number, signal.SIG_IGN)
    # A structure of 100,000 tensors is a tree without a cycle: to look for some while it grows takes seconds.
    gc.set_threshold(_GC_THRESHOLD)
    _step_back()
    trainer, (connection, *slots) = int(arguments[4]), map(int, arguments[6].split(","))
    wire = Wire(socket.socket(fileno=connection), send_timeout_s=_SEND_TIMEOUT_S)
    opened = wire.receive(ORDERS, lambda: os.getppid() != trainer)
    if not isinstance(opened, Open):
        return 0  # the trainer was gone before it had said anything
    return _Life(wire, opened, [Slot(file) for file in slots]).live(trainer)


class _Life:
    """Two threads: the main one listens, another one works."""

    def __init__(self, wire: Wire, opened: Open, slots: Sequence[Slot]) -> None:
        self._wire = wire
        self._store = open_store(opened.url, storage_options=opened.options)
        self._worker = Worker(self._store, opened, slots, self._say)
        tiering = Tiering(opened, slots, say=self._say, clock=SYSTEM_CLOCK) if opened.tiers else None
        self._serving = Serving(self._worker, self._say, tiering=tiering)
        self._presence: Presence | None = None
        try:
            self._presence = Presence(opened)
        except OSError as error:
            self._unseen(error)
        self._receiving: Receiving | None = None
        if opened.tiers and opened.copies:
            try:
                self._receiving = Receiving(open_tier(opened.tiers[0]))
            except OSError as error:
                self._say(Noticed(message=f"no copies of other nodes can be taken: {error}"))

    def live(self, trainer: int) -> int:
        """Return the exit status."""
        working = threading.Thread(target=self._work, name="resilient-work")
        working.start()
        receiving = self._receiving
        ready = Ready(pid=os.getpid())
        if receiving is not None:
            ready = Ready(pid=os.getpid(), port=receiving.port, token=receiving.token)
        self._say(ready)
        closed = self._listen(trainer)
        if not closed:
            self._worker.leave()
            self._serving.take(Close())
        working.join()
        # Whatever a client library does when it is closed: this process has nothing more to do, and must not stay.
        faulthandler.dump_traceback_later(_END_S, exit=True)
        if self._presence is not None:
            self._presence.close()
        self._store.close()
        return 0

    def _work(self) -> None:
        try:
            self._serving.run()
        finally:
            self._wire.hang_up()  # or the trainer would go on ordering from nobody

    def _listen(self, trainer: int) -> bool:
        """Take orders; say whether the last one was to close. A trainer that is gone orders no more."""
        while (order := self._wire.receive(ORDERS, lambda: os.getppid() != trainer)) is not None:
            if isinstance(order, Save):
                self._promise(order)
            self._serving.take(order)
            if isinstance(order, Close):
                return True
        return False

    def _promise(self, order: Save) -> None:
        if self._presence is not None:
            try:
                self._presence.promise(order)
            except OSError as error:
                self._unseen(error)

    def _say(self, answer: Answer) -> None:
        if self._presence is not None and not isinstance(answer, Taken):
            with suppress(OSError):  # the file then says of a save that it goes on; it ends with this process
                self._presence.follow(answer)
        try:
            self._wire.send(answer)
        except OSError:
            self._wire.hang_up()  # nobody listens any more; the listening thread sees that too

    def _unseen(self, error: OSError) -> None:
        what = "a restart of this job will not wait for saves in flight: their list cannot be kept"
        self._say(Noticed(message=f"{what} ({error})"))


def _step_back() -> None:
    """Leave processor and disk to the training."""
    os.nice(_NICE)  # the priority of input and output follows
    # A session of its own is a scheduling group of its own, beside which the nice value of its members counts nothing.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICE), encoding="ascii")
