"""What befalls an operation on the store: drawn by chance, or told by a script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from random import Random  # noqa: TID251 -- the type alone: callers pass a seeded one
from typing import Final, NamedTuple, TypeAlias

from resilient.format import layout
from resilient.testing.simulation.scheduling import Process

QUICK_S: Final = 0.015
"""How long an operation takes at most when nothing befalls it."""


class What(StrEnum):
    """Which fault. ``late``: the store was asked, and carries it out when the client has long given up."""

    DIES = "dies before it"
    DIES_AFTER = "dies after it"
    STALLS = "stalls before it"
    LOST = "its response is lost"
    REFUSED = "the store refuses it"
    LATE = "it lands late"
    CUT_OFF = "its machine is cut off"


class Fate(NamedTuple):
    """After how long an operation lands, and what befalls it; ``lasts_s``: a stall, a partition, a late landing."""

    delay_s: float
    what: What | None = None
    lasts_s: float = 0.0


Fates: TypeAlias = Callable[[Process, str, str], Fate]
"""Says what befalls an operation of a process: a verb and a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chances:
    """How often something befalls an operation of a cluster of 64 ranks; fewer ranks have more of it each.

    What decides about a run (claims, bases, hints, manifests, COMMIT, TOMBSTONE, deletions) is ``deciding`` times as
    likely to be hit, whatever the number of ranks; data and receipts are ``uploads`` times as likely.
    """

    dies: float = 0.0001
    dies_after: float = 0.00005
    stalls: float = 0.0003
    lost: float = 0.0003
    refused: float = 0.0002
    late: float = 0.0001
    cut_off: float = 0.00005
    deciding: float = 40.0
    uploads: float = 3.0
    longest_s: float = 400.0

    @classmethod
    def none(cls) -> Chances:
        """Return a world without faults, in which operations still take turns at random."""
        return cls(dies=0.0, dies_after=0.0, stalls=0.0, lost=0.0, refused=0.0, late=0.0, cut_off=0.0)


class RandomFates:
    """Draws what befalls each operation."""

    def __init__(self, chances: Chances, rng: Random, world_size: int) -> None:
        self._rng = rng
        self._chances = chances
        each = (
            (What.DIES, chances.dies),
            (What.DIES_AFTER, chances.dies_after),
            (What.STALLS, chances.stalls),
            (What.LOST, chances.lost),
            (What.REFUSED, chances.refused),
            (What.LATE, chances.late),
            (What.CUT_OFF, chances.cut_off),
        )
        self._kinds = [kind for kind, _ in each]
        self._weights = [weight for _, weight in each]
        self._total = sum(self._weights)
        self._common = 64.0 / max(world_size, 4)
        self._uploads = self._common * chances.uploads
        self._most = self._total * max(chances.deciding, self._common, self._uploads)

    def __call__(self, process: Process, verb: str, key: str) -> Fate:
        rng = self._rng
        delay_s = rng.random() * QUICK_S
        drawn = rng.random()
        if drawn >= self._most or process.sound or drawn >= self._total * self._weight(verb, key):
            return Fate(delay_s)
        what = rng.choices(self._kinds, self._weights)[0]
        # From a moment to minutes, each order of magnitude as often.
        lasts_s = 0.1 * (10.0 * self._chances.longest_s) ** rng.random()
        return Fate(delay_s, what, lasts_s)

    def _weight(self, verb: str, key: str) -> float:
        if verb in {"get", "size", "list"}:
            return self._common
        if verb == "delete" or key.startswith(layout.GENERATIONS) or (verb == "create" and "/receipts/" not in key):
            return self._chances.deciding
        return self._uploads if not key.startswith(layout.CONTROL) else self._common


class Script:
    """Lets one thing happen, at one operation; nothing else befalls anybody.

    Args:
        where: says whether this is the operation; asked for each until it says yes, then never again.
        fate: what befalls it then.
        rng: for the time that operations take, and so for their order.
    """

    def __init__(self, where: Callable[[Process, str, str], bool], fate: Fate, rng: Random) -> None:
        self._where = where
        self._fate = fate
        self._rng = rng
        self.happened: tuple[str, str, str] | None = None

    def __call__(self, process: Process, verb: str, key: str) -> Fate:
        delay_s = self._rng.random() * QUICK_S
        if self.happened is None and self._where(process, verb, key):
            self.happened = (process.name, verb, key)
            return self._fate._replace(delay_s=delay_s)
        return Fate(delay_s)
