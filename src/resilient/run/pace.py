"""What a policy gets to decide from whether a save is due now."""

from __future__ import annotations

from datetime import datetime

from resilient.clock import Clock
from resilient.config import Settings
from resilient.events import Bus, Event, Notice, SaveCommitted, SaveFenced, SaveStarted
from resilient.policy.interval import SaveContext, mean_time_between_failures
from resilient.policy.planning.choosing import about_objective
from resilient.policy.planning.measured import Measured
from resilient.run.opening import Opened


class Pace:
    """Measures what saves cost, from the events of this rank, and says if an objective cannot be met."""

    def __init__(self, opened: Opened, settings: Settings, *, bus: Bus, clock: Clock) -> None:
        self._created = datetime.fromisoformat(opened.created)
        self._restarts = opened.claim.generation - 1
        self._settings = settings
        self.rank = opened.peers.rank
        self._bus = bus
        self._clock = clock
        self._stalls = Measured()
        self._persists = Measured()
        self._late = Measured()
        self._context: SaveContext | None = None
        self._news = False
        self._told = ""
        bus.subscribe(self._follow)

    def context(self, step: int, *, saved_s: float) -> SaveContext:
        """Return what is known after ``step`` complete steps; the save before began at ``saved_s`` of the clock."""
        known = self._persists.usual_s is not None
        context = SaveContext(
            step=step,
            since_save_s=self._clock.monotonic() - saved_s,
            stall_s=self._stalls.usual_s if known else None,
            persist_s=self._persists.usual_s,
            mtbf_s=mean_time_between_failures((self._clock.now() - self._created).total_seconds(), self._restarts),
            worst_persist_s=self._persists.worst_s,
            late_s=self._late.worst_s or 0.0,
            overhead_budget=self._settings.overhead_budget,
            rpo_s=self._settings.rpo,
        )
        self._context = context
        if self._news:
            self._news = False
            self._look_at_objective(context)
        return context

    def _follow(self, event: Event) -> None:
        match event:
            case SaveStarted():
                self._measure_lateness(event.reason)
                self._stalls.add(event.stall_s)
            case SaveFenced():
                self._stalls.add_to_last(event.waited_s)
            case SaveCommitted():
                self._persists.add(event.duration_s)
                self._news = True

    def _measure_lateness(self, reason: str) -> None:
        """Take note of how much later a save starts than it was due: at the end of a step, a few steps on."""
        choice = None if self._context is None else self._context.choice()
        if self._context is not None and choice is not None and reason == "interval":
            self._late.add(max(0.0, self._context.since_save_s - choice.period_s))

    def _look_at_objective(self, context: SaveContext) -> None:
        """Say whether the objective can be met, once, and again when that has changed."""
        choice = context.choice()
        if context.rpo_s is None or choice is None or self.rank != 0:  # rank 0 decides when all save
            return
        kind, sentence = about_objective(choice, rpo_s=context.rpo_s, budget=context.overhead_budget)
        if kind != self._told:
            self._told = kind
            met = f"rpo: {context.rpo_s:g} s is met again, within the budget"
            self._bus.emit(Notice(rank=self.rank, message=sentence or met))
