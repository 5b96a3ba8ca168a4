"""When a state goes to the tiers of the node alone, and what that is worth: one life of a run."""

from __future__ import annotations

import threading
from dataclasses import replace

from resilient.catalog.process import host
from resilient.clock import Clock
from resilient.config import Settings, read_process
from resilient.engine.host_memory import available_nbytes
from resilient.engine.saver import Saver
from resilient.engine.tiers.places import check_room
from resilient.errors import ResilientError
from resilient.events import AtStake, Bus, Event, Notice, SaveCommitted
from resilient.format import sizes
from resilient.policy.interval import SaveContext, parse_every
from resilient.run.boundary_state import BoundaryState
from resilient.run.opening import Opened
from resilient.run.overlap import Overlap
from resilient.run.schedule import Schedule, schedule_for

_COPIES = 2  # the newest that is complete on all ranks, and the one that is being written
_STORE = "store"


class TierSaves:
    """Keeps the newest states in the tiers of the nodes, between the saves; does nothing where there are no tiers."""

    def __init__(self, opened: Opened, settings: Settings, saver: Saver, *, bus: Bus, clock: Clock) -> None:
        self._opened = opened
        self._settings = settings
        self._saver = saver
        self._bus = bus
        self._clock = clock
        self._last_s = clock.monotonic()
        self._begun = False
        self._schedule: Schedule | None = None
        self._done = False
        self._copies = False
        self._lock = threading.Lock()  # what is complete is found out on another thread than what is committed
        self._near: int | None = None
        self._stored: int | None = None
        if not opened.tiers.own:
            return
        policy = parse_every(settings.tier_every)
        topic = f"tiers-schedule/{opened.claim.generation}-{opened.claim.nonce}"
        self._schedule = schedule_for(policy, opened.peers, topic=topic, clock=clock, skipped=_not_told)
        if opened.peers.rank == 0 and saver.near.complete is not None:
            saver.near.complete.told = self._complete
            bus.subscribe(self._follow)

    def start(self, resumed: int | None) -> None:
        """Begin: say what the tiers need, and have it.

        Raises:
            StoreError: kind ``no-space``: there is no room for it.
        """
        tiers, opened = self._opened.tiers, self._opened
        if not tiers.own:
            return
        self._stored = resumed
        self._meet()
        copies = _COPIES * (2 if self._copies else 1)
        nbytes = self._saver.reserved_nbytes * opened.local_ranks
        check_room(tiers, opened.run_id, copies * nbytes, available=lambda: available_nbytes(1))
        names = ", ".join(f"{tier.name} tier: {copies} x {sizes.in_words(nbytes)} on each node" for tier in tiers.own)
        self._bus.emit(Notice(rank=opened.peers.rank, message=names))

    def at_boundary(
        self, context: SaveContext, boundary: BoundaryState, overlap: Overlap | None, *, saves: bool
    ) -> None:
        """Keep the state of this boundary near if it is due; raises nothing, and waits for nothing.

        Not if ``saves`` is False: nothing can be saved here, or it is saved anyway.
        """
        if self._schedule is None or not self._due(self._schedule, context) or not saves or overlap is None:
            return
        try:
            captured = boundary.capture()
        except ResilientError:
            return  # the next save says it
        if self._saver.keep_near(context.step, captured, overlapped=overlap.leaves(captured), watch=overlap.watch):
            self._last_s = self._clock.monotonic()

    def done(self) -> None:
        """Take note that the run is over and all of it in the store."""
        self._done = True

    def close(self) -> None:
        """End, after the last save; the tiers of a run that is done go, those of any other stay for the next start."""
        if self._schedule is not None:
            self._schedule.close()
        if self._done:
            self._opened.tiers.remove_own()

    def _meet(self) -> None:
        """Find the node that keeps a copy of what is here, if that is wanted."""
        partners, opened, settings = self._saver.near.partners, self._opened, self._settings
        if partners is None:
            return
        partner = partners.meet(
            node=f"{host()} {opened.tiers.own[0].path}",
            label=settings.node_label or host(),
            master=read_process().master,
            timeout_s=settings.peer_timeout_s,
        )
        self._copies = partner is not None
        if not self._copies:
            why = "no other node has another node_label"
            if partners.deaf is not None:
                why = f"the writer of rank {partners.deaf} takes no copies, as a thread never does"
            message = f"peer_copies is set, and {why}: nothing is copied"
            self._bus.emit(Notice(rank=opened.peers.rank, message=message))

    def _due(self, schedule: Schedule, context: SaveContext) -> bool:
        if not self._begun:
            self._begun = True
            schedule.start(context.step - 1)
        here = replace(
            context,
            since_save_s=self._clock.monotonic() - self._last_s,
            stall_s=self._saver.near.stall_s,
            persist_s=self._saver.near.persist_s,
        )
        return schedule.due(here, self._saver.near.not_yet_complete())

    # --- what is at stake ---------------------------------------------------------------------------------------------

    def _complete(self, step: int) -> None:
        with self._lock:
            first, self._near = self._near is None, step
        if first:
            self._say()

    def _follow(self, event: Event) -> None:
        if isinstance(event, SaveCommitted):
            with self._lock:
                self._stored = event.step
            self._say()

    def _say(self) -> None:
        near, stored = self._near, self._stored
        process, source = stored, _STORE
        if near is not None and (stored is None or near >= stored):
            process, source = near, self._opened.tiers.own[0].name
        node, other = (process, f"{source} of another node") if self._copies and process == near else (stored, _STORE)
        self._bus.emit(AtStake(process_step=process, process_source=source, node_step=node, node_source=other))


def _not_told(step: int, why: str) -> None:
    """A state that is not kept near is none that was promised."""
