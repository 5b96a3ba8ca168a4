"""What becomes of the states that go to the tiers of this node: on their way, complete on all ranks, or failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from resilient.clock import Clock
from resilient.engine.peers import Peers
from resilient.engine.save_settings import SaveSettings
from resilient.engine.saving import TIERS, Saving
from resilient.engine.tiers.complete import Complete
from resilient.engine.tiers.partners import Partners
from resilient.events import Bus, Notice, Tiered
from resilient.format.documents import Claim
from resilient.writer import messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What the writer is told of a state and the tiers: see `messages.Save`."""

    tiers: bool = False
    complete: int | None = None
    copy_to: messages.Address | None = None


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
        self._tiers = settings.tiers
        self._timeout_s = settings.commit_timeout_s
        self._rank = peers.rank
        self._let_go = let_go
        self._bus = bus
        self._clock = clock
        self._on_way: dict[int, Saving] = {}  # by the number of the slot
        self._fault = ""  # what was told last
        self._copy_fault = ""
        self._newest: tuple[int, float] | None = None  # that went there, and when
        self._uncopied: int | None = None  # the newest, if it goes to no other node
        self._given_up: set[int] = set()  # which the writer may still be at

    @property
    def busy(self) -> bool:
        """Whether a state is on its way to the tiers, also one that nobody waits for any more."""
        return bool(self._on_way or self._given_up)

    def track(self, saving: Saving, slot: int) -> None:
        """Follow a save, if it goes to the tiers."""
        if TIERS in saving.needed_by:
            self._on_way[slot] = saving

    def has(self, step: int) -> bool:
        """Say whether a step is in the tiers, or on its way: then what is stored of it must replace that."""
        return step in {each.step for each in list(self._on_way.values())} or step == self._newest_step

    def admit(self, saving: Saving) -> Word:
        """Decide whether a state goes to the tiers when it is handed over, and what its writer is told.

        Not while the one before is on its way, or may still become complete: there is room for two, and a tier that is
        slow must not keep the slots of saves. One that is there already is replaced: one name, one content.
        """
        if self.complete is None or TIERS not in saving.needed_by:
            return Word()
        complete = self.complete.newest()
        behind = any(each is not saving for each in list(self._on_way.values())) or self._is_open
        if self._given_up or (behind and saving.step != self._newest_step):
            self.over(saving)
            self.refuse(saving.step)
            return Word()
        self._newest = (saving.step, self._clock.monotonic())
        copy_to = None if self.partners is None else self.partners.address()
        self._uncopied = saving.step if copy_to is None else None
        return Word(tiers=True, complete=complete, copy_to=copy_to)

    def refuse(self, step: int) -> None:
        """Say that a state does not go to the tiers of this rank: the others would wait for it."""
        if self._rank or not self._is_open:  # on rank 0 that would decide about the one before as well
            self._failed(step)

    def not_yet_complete(self) -> int | None:
        """Return the newest step that goes to the tiers, if not all ranks have it there; on rank 0, which decides.

        One that some rank does not have after a while, since it failed there, is waited for no longer.
        """
        on_way = max((each.step for each in list(self._on_way.values())), default=None)
        if on_way is not None or self._newest is None or self.complete is None or not self._is_open:
            return on_way
        step, begun_s = self._newest
        if self._clock.monotonic() - begun_s > self._timeout_s:
            self.complete.failed(step)
        return step

    def watch(self) -> None:
        """Use tiers that hang no more until they go on: a slot that they keep is one less for the saves."""
        now_s = self._clock.monotonic()
        for saving in list(self._on_way.values()):
            if saving.ordered_s is not None and now_s - saving.ordered_s > self._timeout_s:
                self.tell(f"step {saving.step} is not there after {self._timeout_s:g} s, and no other one is tried")
                self._give_up(saving)

    def give_way(self) -> None:
        """Take the slots that only the tiers still need: a save is waiting for one.

        A writer that is at it finds out by the stamp, and leaves no receipt.
        """
        for saving in list(self._on_way.values()):
            if saving.ordered_s is not None and saving.needed_by == {TIERS}:
                self.tell(f"step {saving.step} was given up for a save, which had no other place to be staged")
                self._give_up(saving)

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

    def drop(self, saving: Saving) -> None:
        """Take note that a state does not come to the tiers, if it was to."""
        if TIERS in saving.needed_by:
            self.over(saving)
            self._failed(saving.step)

    def died(self, writer: int) -> None:
        """Take note that a writer is gone, with all that it had in hand."""
        for saving in list(self._on_way.values()):
            if saving.writer == writer:
                self.drop(saving)
        self._given_up.clear()  # the next one begins anew

    def tiered(self, answer: messages.Tiered, *, stall_s: float) -> None:
        """Take note of what the writer has done; ``stall_s``: of the last save to the store."""
        self._given_up.discard(answer.step)
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
            self._failed(answer.step)
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
        elif answer.step == self._uncopied or self._tiers[0].name not in answer.written:
            self._failed(answer.step)

    def copied(self, answer: messages.Copied) -> None:
        """Take note of whether another node has a copy."""
        if answer.fault:
            if not self._copy_fault:
                self._notice(f"the newest state is on this node only, training and saves go on: {answer.fault}")
            self._copy_fault = answer.fault
            self._failed(answer.step)
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

    @property
    def _newest_step(self) -> int | None:
        return None if self._newest is None else self._newest[0]

    @property
    def _is_open(self) -> bool:
        """Whether the newest one may still become complete."""
        return self._newest is not None and self.complete is not None and not self.complete.settled(self._newest[0])

    def _give_up(self, saving: Saving) -> None:
        self._given_up.add(saving.step)
        self.drop(saving)

    def _failed(self, step: int) -> None:
        if self.complete is not None:
            self.complete.failed(step)

    def _notice(self, message: str) -> None:
        self._bus.emit(Notice(rank=self._rank, message=message))
