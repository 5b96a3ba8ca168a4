"""Comparing the ranks with each other without a collective: each says now and then how long its turns take.

What a rank says lies under one key, which it writes again and again: the key-value store of a job that runs for weeks
must not grow.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from statistics import median
from typing import Final

import msgspec

from resilient.clock import Clock
from resilient.engine.peers import Peers
from resilient.errors import PeerError
from resilient.events import Bus, StragglerFound
from resilient.policy.stragglers import STEP, Stragglers
from resilient.run.sections import DATA, Sections, Turn

COMPUTE: Final = "compute"
_FEW: Final = 5
"""Turns of which no median is made: they are told with the next ones."""

_JOIN_S: Final = 0.5


class _Report(msgspec.Struct, array_like=True):
    number: int
    medians: dict[str, float]


class StragglerWatch:
    """A thread of each rank that tells its times, and on rank 0 scores those of all."""

    def __init__(self, sections: Sections, peers: Peers, *, topic: str, every_s: float, bus: Bus, clock: Clock) -> None:
        self._sections = sections
        self._peers = peers
        self._topic = topic
        self._every_s = every_s
        self._bus = bus
        self._clock = clock
        self._turns: list[Turn] = []
        self._told = 0
        self._used: dict[int, int] = {}
        self._rule = Stragglers()
        self.reports = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resilient-stragglers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Tell nothing any more; a question that is under way is not waited for for long."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def tell(self) -> None:
        """Say how long the turns since the last time took.

        Raises:
            PeerError: the store does not answer.
        """
        self._turns += self._sections.take()
        if len(self._turns) < _FEW:
            return
        turns, self._turns = self._turns, []
        self._told += 1
        report = _Report(self._told, medians_of(turns))
        self._peers.publish(f"{self._topic}/{self._peers.rank}", msgspec.msgpack.encode(report))

    def score(self) -> bool:
        """Score what all ranks have said, if all have since the last time; say whether they have."""
        found: dict[int, _Report] = {}
        for rank in range(self._peers.world_size):
            said = self._peers.fetch(f"{self._topic}/{rank}", 0.0)
            if said is None:
                return False
            found[rank] = msgspec.msgpack.decode(said, type=_Report)
        if any(report.number <= self._used.get(rank, 0) for rank, report in found.items()):
            return False
        self._used = {rank: report.number for rank, report in found.items()}
        self.reports += 1
        for slow in self._rule.take({rank: report.medians for rank, report in found.items()}):
            self._bus.emit(
                StragglerFound(
                    rank=self._peers.rank,
                    straggler=slow.rank,
                    section=slow.section,
                    own_s=slow.own_s,
                    best_s=slow.best_s,
                    reports=slow.reports,
                )
            )
        return True

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                self.tell()
                if self._peers.rank == 0:
                    self.score()
            except PeerError:
                continue  # it may only be slow; if it is gone, so is the job, which says so itself


def medians_of(turns: Sequence[Turn]) -> dict[str, float]:
    """Return the median of each section, in seconds."""
    found = {STEP: median(turn.step_s for turn in turns), DATA: median(turn.data_s for turn in turns)}
    computed = [turn.compute_s for turn in turns if turn.compute_s is not None]
    if len(computed) == len(turns):
        found[COMPUTE] = median(computed)
    return found
