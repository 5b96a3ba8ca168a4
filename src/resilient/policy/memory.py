"""How many copies of a state the memory of a host has room for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

MOST_SLOTS: Final = 2
_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a group of processes may use, uses, and could give back at once (the page cache that nobody needs now)."""

    nbytes: int
    used: int
    reclaimable: int = 0


def available(free_nbytes: int, limits: Iterable[Limit], *, local_ranks: int) -> int:
    """Return how much memory one of the ranks of a host may still take: of what is free, within every limit."""
    rooms = [limit.nbytes - limit.used + limit.reclaimable for limit in limits]
    return max(0, min([free_nbytes, *rooms])) // local_ranks


def slots_that_fit(nbytes: int, available_nbytes: int, *, wanted: int | None = None) -> int:
    """Return how many slots of ``nbytes`` to have: 2, 1, or 0 if there is no room for one.

    Two let a save begin while the one before is still being written, and are taken only if they leave half of the
    memory to everything else, unless ``wanted`` says how many there should be.
    """
    most = wanted or (MOST_SLOTS if MOST_SLOTS * nbytes <= _SHARE * available_nbytes else 1)
    return max(count for count in range(most + 1) if count * nbytes <= available_nbytes)
