"""What the ranks tell each other about a save: that they hold the same tensors, and that a rank's part will not come.

Neither is needed for a save to be right: the commit proves coverage from the store alone. The first lets replicated
bytes be written once, the second spares the others a wait until their deadline.
"""

from __future__ import annotations

from resilient.clock import SYSTEM_CLOCK, Deadline
from resilient.engine.peers import Peers
from resilient.errors import PeerError
from resilient.format.documents import Claim


class Agreement:
    """The words of one generation; may be used from any thread."""

    def __init__(self, claim: Claim, peers: Peers, *, timeout_s: float) -> None:
        self._peers = peers
        self._timeout_s = timeout_s
        self._generation = f"{claim.generation}-{claim.nonce}"
        self._known: dict[bytes, bool] = {}

    def known(self, structure: bytes) -> bool | None:
        """Say whether all ranks hold the plain tensors of this signature; None if they have not compared it yet."""
        return True if self._peers.world_size == 1 else self._known.get(structure)

    def compare(self, structure: bytes, topic: str) -> bool:
        """Find out; a rank that does not answer in time means no, for this once.

        Whatever the ranks conclude, each by itself, is safe: "yes" stores a share, "no" stores all.
        """
        known = self.known(structure)
        if known is not None:
            return known
        try:
            answers = self._peers.gather(f"structure/{self._generation}/{topic}", structure, self._timeout_s)
        except PeerError:
            return False
        self._known[structure] = all(answer == structure for answer in answers)
        return self._known[structure]

    def tell_failure(self, step: int, what: str) -> None:
        """Tell the others that this rank's part of a step will not come."""
        try:
            self._peers.publish(self._failures_of(step), f"rank {self._peers.rank}: {what}".encode())
        except PeerError:
            return  # nobody can be told, and the deadline is for that

    def tell_unchanged(self, step: int) -> None:
        """Tell the others that this rank's part of what was trained is at this step what it was at the save before."""
        if self._peers.world_size > 1:
            try:
                self._peers.publish(f"{self._unchanged_at(step)}/{self._peers.rank}", b"")
            except PeerError:
                return  # then nobody hears an alarm

    def is_unchanged(self, step: int, timeout_s: float) -> bool:
        """Say whether all the others have told that, within that time."""
        deadline = Deadline(SYSTEM_CLOCK, timeout_s)
        others = [rank for rank in range(self._peers.world_size) if rank != self._peers.rank]
        try:
            return all(
                self._peers.fetch(f"{self._unchanged_at(step)}/{rank}", deadline.remaining_s) is not None
                for rank in others
            )
        except PeerError:
            return False

    def failure(self, step: int) -> str | None:
        """Return what another rank has told about a step, without waiting."""
        if self._peers.world_size == 1:
            return None
        try:
            found = self._peers.fetch(self._failures_of(step), 0)
        except PeerError:
            return None  # a commit needs the store alone
        return None if found is None else found.decode()

    def _unchanged_at(self, step: int) -> str:
        return f"unchanged/{self._generation}/{step}"

    def _failures_of(self, step: int) -> str:
        return f"failed/{self._generation}/{step}"
