"""Where a life of a run starts from, and what it leaves behind for the next one if it fails."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

import msgspec

from resilient.catalog.outcomes import left_out, write_outcome
from resilient.clock import Clock, rfc3339
from resilient.config import Settings
from resilient.engine.judging import judge_failures
from resilient.engine.restore import RestoredFrom, restore
from resilient.errors import ResilientError
from resilient.events import Bus, Event, RestoreStarted
from resilient.format.documents import Outcome
from resilient.run.failures import cause_of, fingerprint, first_cause
from resilient.run.nearest import Nearest
from resilient.run.opening import Opened
from resilient.run.sampler import ElasticSampler
from resilient.run.witness_verdict import tell_failure
from resilient.state.items import unwrapped

_TELL_S: Final = 10.0


class Resuming:
    """Restores what a run continues from, after looking at how the lives before ended, and tells how this one does."""

    def __init__(self, opened: Opened, settings: Settings, *, program: str, bus: Bus, clock: Clock) -> None:
        self._opened = opened
        self._settings = settings
        self._program = program
        self._bus = bus
        self._clock = clock
        self._tried: RestoreStarted | None = None
        self._begun = False

    def resume(self, items: Mapping[str, object]) -> RestoredFrom | None:
        """Fill the items from the newest usable checkpoint; raises what `restore` and `judge_failures` raise."""
        opened, settings = self._opened, self._settings
        left_out = self._judge() if settings.resume != "never" else {}
        self._begun = True
        unsubscribe = self._bus.subscribe(self._note)
        nearest = Nearest(opened, settings, bus=self._bus, clock=self._clock)
        if settings.resume != "never":
            nearest.finish()
        try:
            restored = restore(
                nearest.store,
                items,
                opened.peers,
                resume=settings.resume,  # type: ignore[arg-type]  # config has checked which text it is
                strict=settings.strict,
                bus=self._bus,
                timeout_s=settings.restore_timeout_s,
                clock=self._clock,
            )
        finally:
            unsubscribe()
        nearest.tell(restored)
        for name, places in left_out.items():
            if isinstance(sampler := unwrapped(items.get(name)), ElasticSampler):
                for place in places:
                    sampler.leave_out(*place)
        return restored

    def tell(self, error: BaseException, *, step: int, leave_out: Mapping[str, tuple[int, int]] | None = None) -> None:
        """Leave word of the failure that ends this life, if it is one; wait for a store that is away only so long.

        ``leave_out``: the samples that the next life is not to use.
        """
        cause = first_cause(error)
        if cause is None or not self._begun:
            return
        how = (cause, step, dict(leave_out or {}))
        telling = threading.Thread(target=self._tell, args=how, name="resilient-outcome", daemon=True)
        telling.start()
        telling.join(_TELL_S)

    def _judge(self) -> dict[str, list[tuple[int, int]]]:
        opened = self._opened

        def look() -> bytes:
            tell_failure(opened, self._settings, bus=self._bus, clock=self._clock)
            if self._settings.policy == "act":
                judge_failures(opened.store, opened.claim, self._settings, bus=self._bus, clock=self._clock)
            return msgspec.msgpack.encode(left_out(opened.store, before=opened.claim.generation))

        answer = opened.peers.share(opened.peers.numbered("judged"), look, self._settings.restore_timeout_s)
        return msgspec.msgpack.decode(answer, type=dict[str, list[tuple[int, int]]])

    def _note(self, event: Event) -> None:
        if isinstance(event, RestoreStarted):
            self._tried = event

    def _tell(self, cause: BaseException, step: int, leave_out: dict[str, tuple[int, int]]) -> None:
        claim, tried = self._opened.claim, self._tried
        outcome = Outcome(
            generation=claim.generation,
            nonce=claim.nonce,
            launch=claim.launch,
            rank=self._opened.peers.rank,
            error=type(cause).__name__,
            message=fingerprint(cause),
            cause=cause_of(cause),
            program=self._program,
            step=step if tried is None else max(step, tried.step),
            created=rfc3339(self._clock.now()),
            restored_step=None if tried is None else tried.step,
            restored_generation=None if tried is None else tried.generation,
            restored_nonce=None if tried is None else tried.nonce,
            leave_out=leave_out,
        )
        try:
            write_outcome(self._opened.store, outcome)
        except ResilientError:
            return  # the failure itself is what matters; the next life then knows one less
