"""Whether all ranks look at one place: a path that each resolves for itself may be another directory on each."""

from __future__ import annotations

from typing import Final

from resilient.catalog.generations import read_claim
from resilient.clock import Clock, Deadline
from resilient.engine.peers import Peers
from resilient.errors import ErrorKind, UsageError
from resilient.format.documents import Claim
from resilient.store.base import Store

_FIND_S: Final = 5.0
_POLL_S: Final = 0.1


def check_same_place(store: Store, claim: Claim, peers: Peers, *, made_in: str, timeout_s: float, clock: Clock) -> None:
    """Look on each rank for what rank 0 has just written; every rank calls this.

    Args:
        store: as this rank has opened it.
        claim: of the generation that rank 0 has begun.
        peers: of this generation.
        made_in: the URL of the store of rank 0. Another one may be the same place: mounts have names of their own.
        timeout_s: how long the ranks wait for each other.
        clock: measures the wait for a file system that is slow to show what another host has written.

    Raises:
        UsageError: on all ranks: some would save their part where nobody looks for it.
        PeerError: some ranks did not answer in time; they are named.
    """
    if peers.world_size == 1:
        return
    finds = peers.rank == 0 or _finds(store, claim, clock)
    answers = peers.gather(peers.numbered("place"), b"" if finds else store.url.encode(), timeout_s)
    lost = [rank for rank, url in enumerate(answers) if url]
    if lost:
        theirs = answers[lost[0]].decode()
        others = f", nor do {len(lost) - 1} others in theirs" if len(lost) > 1 else ""
        raise UsageError(
            f"rank {lost[0]} does not find in {theirs} what rank 0 has written in {made_in}{others}: "
            "the ranks do not share one place",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint="pass an absolute path on a file system that all nodes mount, or a URL",
        )


def _finds(store: Store, claim: Claim, clock: Clock) -> bool:
    deadline = Deadline(clock, _FIND_S)
    while (found := read_claim(store, claim.generation)) is None or found.nonce != claim.nonce:
        if deadline.expired:
            return False
        clock.sleep(_POLL_S)
    return True
