"""Saves of an earlier life of a run that its writers are still finishing: a start waits for them.

A writer outlives its trainer. The state that it holds is newer than anything that is committed, so a restart that comes
quickly enough would otherwise continue from an older step and put the newer one off the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from resilient.catalog.commit import read_commit
from resilient.catalog.once import exists
from resilient.clock import Clock, Deadline
from resilient.engine.peers import Peers
from resilient.events import Bus, Notice
from resilient.format.layout import Attempt
from resilient.store.base import Store
from resilient.writer.presence import TIERING, InFlight, in_flight

_POLL_S: Final = 0.05


class _Held(msgspec.Struct, array_like=True, frozen=True):
    """One rank's part of an attempt that a living writer holds."""

    step: int
    generation: int
    nonce: str
    rank: int
    world_size: int


def await_leftovers(
    store: Store, run_id: str, peers: Peers, *, generation: int, timeout_s: float, bus: Bus, clock: Clock
) -> None:
    """Wait until what earlier generations have staged is committed, or cannot be any more; every rank calls this.

    An attempt is waited for only while each of its ranks has either stored its part or has a living writer that holds
    it: after the loss of a node nobody waits for what was on it.

    Args:
        store: of the run.
        run_id: of the run; writers are looked up by it on each host.
        peers: of the new generation, all of them alive.
        generation: the new one; its own writers are left alone.
        timeout_s: the longest wait, for everything.
        bus: where the wait is reported.
        clock: measures it.
    """
    deadline = Deadline(clock, timeout_s)
    mine = [_Held(each.step, each.generation, each.nonce, each.rank, each.world_size) for each in _saves(run_id)]
    earlier = [each for each in mine if each.generation < generation]
    answers = peers.gather(peers.numbered("leftovers"), msgspec.msgpack.encode(earlier), timeout_s)
    if peers.rank != 0:
        return  # rank 0 decides what to restore, and tells the others only after the wait
    held = [each for answer in answers for each in msgspec.msgpack.decode(answer, type=list[_Held])]
    for attempt in sorted({Attempt(each.step, each.generation, each.nonce) for each in held}, reverse=True):
        parts = [each for each in held if (each.step, each.generation, each.nonce) == _key(attempt)]
        if _is_hopeful(store, attempt, parts):
            bus.emit(Notice(message=f"waiting for the save of {attempt}, which a writer is still finishing"))
            _await_commit(store, run_id, attempt, deadline, clock)


def _key(attempt: Attempt) -> tuple[int, int, str]:
    return attempt.step, attempt.generation, attempt.nonce


def _is_hopeful(store: Store, attempt: Attempt, parts: Sequence[_Held]) -> bool:
    absent = set(range(parts[0].world_size)) - {each.rank for each in parts}
    return all(exists(store, attempt.receipt(rank)) for rank in absent)


def _await_commit(store: Store, run_id: str, attempt: Attempt, deadline: Deadline, clock: Clock) -> None:
    """Wait for a COMMIT; no longer than writers of this host hold the attempt, if they are the ones that held it."""
    local = _is_here(_saves(run_id), attempt)
    while not deadline.expired:
        still_here = _is_here(_saves(run_id), attempt)
        if read_commit(store, attempt) is not None or (local and not still_here):
            return
        clock.sleep(_POLL_S)


def _saves(run_id: str) -> list[InFlight]:
    """Return what will be committed; what goes to the tiers of this node alone will not."""
    return [each for each in in_flight(run_id) if each.phase != TIERING]


def _is_here(writers: Sequence[InFlight], attempt: Attempt) -> bool:
    return any((each.step, each.generation, each.nonce) == _key(attempt) for each in writers)
