"""When a rank asks whether its save is committed, and when it tries itself: so that many ranks do not storm a store.

Pure functions of rank and world size. A store answers a few thousand requests per second under one prefix, and every
rank of a job waits for the same object.
"""

from __future__ import annotations

from typing import Final

_REQUESTS_PER_S: Final = 1000.0
_FIRST_POLL_S: Final = 0.01
_LAST_POLL_S: Final = 0.5
_GROWTH: Final = 1.5
_SPREAD: Final = 0.5
_GOLDEN: Final = 0.6180339887498949

_TAKEOVER_S: Final = 2.0
_MERGE_S_PER_RANK: Final = 0.004


def poll_s(asked: int, *, rank: int, world_size: int) -> float:
    """Return how long a rank waits before it asks again, having asked ``asked`` times.

    A few ranks ask soon and then less often; of many, all together ask about a thousand times a second at most. Ranks
    wait differently long, by up to a half, so that they do not ask in step.
    """
    least_s = world_size / _REQUESTS_PER_S
    growing_s = _FIRST_POLL_S * _GROWTH ** min(asked, 64)
    spread = 1.0 + _SPREAD * (rank * _GOLDEN % 1.0)
    return max(min(growing_s, _LAST_POLL_S), least_s) * spread


def takeover_s(*, rank: int, world_size: int) -> float:
    """Return how long after its own receipt a rank tries to commit itself; rank 0 tries at once.

    The others take over one after another, each after the time in which the one before it would have been done: a merge
    takes longer the more ranks there are, and two at once read every receipt twice.
    """
    return rank * _merge_s(world_size)


def last_turn_s(*, rank: int, world_size: int) -> float:
    """Return how long after its deadline a writer without a trainer tries for the last time, before it leaves.

    When a whole job is killed, all its writers come to that point at once; 4,096 merges of 4,096 receipts would be
    sixteen million reads, to commit one checkpoint. So rank 0 goes first, then two, four, eight ranks: some of the
    first ones are mostly alive, and the others find their COMMIT. If none is, everybody has tried after a dozen turns.
    """
    return (rank + 1).bit_length() * _merge_s(world_size) - _merge_s(world_size)


def _merge_s(world_size: int) -> float:
    return _TAKEOVER_S + _MERGE_S_PER_RANK * world_size
