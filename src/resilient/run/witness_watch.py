"""Seeing how another rank of this machine ends: it can be killed, and then says nothing itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from resilient.catalog.process import host, lives, started
from resilient.clock import SYSTEM_CLOCK, Deadline
from resilient.config import Process
from resilient.engine.peers import Peers
from resilient.errors import PeerError
from resilient.run import witness_kernel as kernel

_INTRODUCED_S: Final = 60.0
_LOOK_S: Final = 0.5  # for so long nobody can make the thread stop
_STOP_S: Final = 2.0
_MOST_SEEN: Final = 4
"""The first ends tell; the others follow from them."""


class Neighbor(msgspec.Struct, array_like=True, frozen=True):
    """A rank of the same agent, as it has introduced itself; ``stderr`` is a file of its own, if there is one."""

    rank: int
    host: str
    pid: int
    started: str
    stderr: str


class Watch:
    """Waits in a thread for the end of the other ranks of this machine; ``seen`` gets each with how it ended.

    Costs nothing while they live: the kernel wakes the thread.
    """

    def __init__(self, peers: Peers, topic: str, process: Process, seen: Callable[[Neighbor, str], None]) -> None:
        first = peers.rank - process.local_rank
        nearby = range(max(0, first), min(peers.world_size, first + process.local_world_size))
        self._others = [rank for rank in nearby if rank != peers.rank]
        self._peers = peers
        self._topic = topic
        self._seen = seen
        self._files: dict[int, Neighbor] = {}
        self._hear, self._tell = -1, -1
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Introduce this process to the others, and watch them from now on."""
        if not self._others or not hasattr(os, "pidfd_open"):
            return
        me = Neighbor(self._peers.rank, host(), os.getpid(), started(os.getpid()), kernel.stderr_file())
        self._peers.publish(f"{self._topic}/{me.rank}", msgspec.msgpack.encode(me))
        self._hear, self._tell = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="resilient-witness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no more. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._closed = True
        # Not its end alone: loader workers that were forked may have this side of the pipe as well.
        with suppress(BrokenPipeError):  # there is nobody left to watch, so that nobody reads it any more
            os.write(self._tell, b".")
        os.close(self._tell)
        if thread is not threading.current_thread():
            thread.join(_STOP_S)  # it may be asking a store that does not answer: a daemon, it holds up no exit

    def _run(self) -> None:
        try:
            self._meet()
            left = _MOST_SEEN
            while self._files and left > 0 and not self._closed:
                ended = kernel.await_end(list(self._files), self._hear)
                # First all of them, then their stories: an agent may look at any moment, and takes the status away.
                told = [(self._files[file], kernel.how_ended(self._files[file].pid)) for file in ended]
                for file in ended:
                    del self._files[file]
                    os.close(file)
                for neighbor, how in told:
                    if not self._closed:  # from then on they may end as they like
                        self._seen(neighbor, how)
                left = left - len(ended) if ended else 0
        finally:
            for file in (*self._files, self._hear):
                os.close(file)

    def _meet(self) -> None:
        deadline = Deadline(SYSTEM_CLOCK, _INTRODUCED_S)
        for rank in self._others:
            found = self._introduction(rank, deadline)
            if found is None or not lives(found.host, found.pid, found.started):
                continue  # on another machine after all, or gone already
            with suppress(OSError):
                self._files[os.pidfd_open(found.pid)] = found

    def _introduction(self, rank: int, deadline: Deadline) -> Neighbor | None:
        """Return who a rank is; None if it has not said so in time, or nobody wants to know any more."""
        found = None
        while found is None and self._thread is not None and not deadline.expired:
            try:
                found = self._peers.fetch(f"{self._topic}/{rank}", _LOOK_S)
            except (RuntimeError, PeerError):
                return None  # the store through which ranks talk is gone, and so is the job
        return None if found is None else msgspec.msgpack.decode(found, type=Neighbor)
