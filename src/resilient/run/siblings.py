"""Whether another rank of this machine is gone: then a signal is no preemption, but what an agent sends to the rest.

An agent ends the workers of its node by the same SIGTERM when one of them has failed, and when the machine goes. In the
first case no stop can be agreed on any more, and each second that is spent on trying delays the restart.
"""

from __future__ import annotations

import os

import msgspec

from resilient.catalog.process import host, lives, started
from resilient.engine.peers import Peers


class _Who(msgspec.Struct, array_like=True):
    host: str
    pid: int
    started: str


class Siblings:
    """The ranks that the same agent has started."""

    def __init__(self, peers: Peers, topic: str, *, local_rank: int, local_world_size: int) -> None:
        self._peers = peers
        self._topic = topic
        first = peers.rank - local_rank
        nearby = range(max(0, first), min(peers.world_size, first + local_world_size))
        self._others = [rank for rank in nearby if rank != peers.rank]
        self._known: dict[int, _Who] = {}

    def introduce(self) -> None:
        """Tell the others which process this is."""
        if self._others:
            who = _Who(host(), os.getpid(), started(os.getpid()))
            self._peers.publish(f"{self._topic}/{self._peers.rank}", msgspec.msgpack.encode(who))

    def gone(self) -> int | None:
        """Return a rank whose process has ended, if there is one; those that were never introduced are not known."""
        for rank in self._others:
            who = self._who(rank)
            if who is not None and lives(who.host, who.pid, who.started) is False:
                return rank
        return None

    def _who(self, rank: int) -> _Who | None:
        if rank not in self._known:  # asked once: all ranks of a large job look often, and one process answers them
            found = self._peers.fetch(f"{self._topic}/{rank}", 0.0)
            if found is None:
                return None
            self._known[rank] = msgspec.msgpack.decode(found, type=_Who)
        return self._known[rank]
