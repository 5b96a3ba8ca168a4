"""What becomes of the states that go to the tiers of this node: on their way, complete on all ranks, or failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from resilient.clock import Clock
from resilient.engine.peers import Peers
from resilient.engine.save_settings import SaveSettings
from resilient.engine.saving import TIERS, Saving
from resilient.engine.tiers.complete import Complete
from resilient.engine.tiers.partners import Partners
from resilient.events import Bus, Notice, Tiered
from resilient.format.documents import Claim
from resilient.writer import messages

_COMPLETE_S: Final = 30.0


class Near:
    """Follows the states of one rank into its tiers; nothing where there are none.

    What fails there fails no save, and is told once for as long as it stays so.
    """

    def __init__(
        self,
        claim: Claim,
        peers: Peers,
        settings: SaveSettings,
        *,
        let_go: Callable[[Saving, str], None],
        bus: Bus,
        clock: Clock,
    ) -> None:
        """``let_go`` is told when the tiers do not need the slot of a save any more."""
        self.stall_s: float | None = None
        self.persist_s: float | None = None
        self.partners = Partners(claim, peers) if settings.copies else None
        self.complete = Complete(claim, peers, what="tiers", clock=clock) if settings.tiers else None
        self._rank = peers.rank
        self._let_go = let_go
        self._bus = bus
        self._clock = clock
        self._on_way: dict[int, Saving] = {}  # by the number of the slot
        self._fault = ""  # what was told last
        self._copy_fault = ""
        self._newest: tuple[int, float] | None = None  # and when it was begun

    @property
    def busy(self) -> bool:
        """Whether a state is on its way to the tiers."""
        return bool(self._on_way)

    def track(self, saving: Saving, slot: int) -> None:
        """Follow a save, if it goes to the tiers."""
        if TIERS in saving.needed_by:
            self._newest = (saving.step, self._clock.monotonic())
            self._on_way[slot] = saving

    def not_yet_complete(self) -> int | None:
        """Return the newest step that goes to the tiers, if not all ranks have it there; on rank 0, which decides.

        One that some rank does not have after a while, since it failed there, is waited for no longer.
        """
        if self._newest is None or self.complete is None:
            return None
        step, begun_s = self._newest
        is_late = self._clock.monotonic() - begun_s > _COMPLETE_S
        return None if is_late or step <= (self.complete.known or -1) else step

    def tell(self, what: str) -> None:
        """Say what is wrong with the tiers, once as long as it stays wrong."""
        if not self._fault:
            self._notice(f"the newest state is not kept near, training and saves go on: {what}")
        self._fault = what

    def over(self, saving: Saving) -> None:
        """Follow a save no longer: the tiers are done with its slot."""
        for slot, each in list(self._on_way.items()):
            if each is saving:
                del self._on_way[slot]
        self._let_go(saving, TIERS)

    def died(self, writer: int) -> None:
        """Take note that a writer is gone, with all that it had in hand."""
        for saving in list(self._on_way.values()):
            if saving.writer == writer:
                self.over(saving)

    def tiered(self, answer: messages.Tiered, *, stall_s: float) -> None:
        """Take note of what the writer has done; ``stall_s``: of the last save to the store."""
        saving = self._on_way.get(answer.slot)
        if saving is None or saving.step != answer.step:
            return
        self.over(saving)
        self.persist_s = self._clock.monotonic() - saving.started_s
        if answer.faults:
            self.tell("; ".join(answer.faults))
        else:
            self._fault = ""
        if not answer.written or self.complete is None:
            return
        event = Tiered(
            rank=self._rank,
            step=answer.step,
            nbytes=answer.nbytes,
            cpu_s=answer.cpu_s,
            duration_s=self.persist_s,
            stall_s=(stall_s if saving.stores else self.stall_s) or 0.0,
            tiers=answer.written,
        )
        self._bus.emit(event)
        if self.partners is None or not self.partners.copies:
            self.complete.written(answer.step)

    def copied(self, answer: messages.Copied) -> None:
        """Take note of whether another node has a copy."""
        if answer.fault:
            if not self._copy_fault:
                self._notice(f"the newest state is on this node only, training and saves go on: {answer.fault}")
            self._copy_fault = answer.fault
            return
        self._copy_fault = ""
        if self.complete is not None:
            self.complete.written(answer.step)

    def listens(self, answer: messages.Ready) -> None:
        """Take note of where this rank's writer takes copies of another node."""
        if self.partners is not None and answer.port:
            self.partners.listens(answer.port, answer.token)

    def close(self) -> None:
        if self.complete is not None:
            self.complete.close()

    def _notice(self, message: str) -> None:
        self._bus.emit(Notice(rank=self._rank, message=message))
