"""What a policy gets to decide from whether a save is due now."""

from __future__ import annotations

from datetime import datetime

from resilient.clock import Clock
from resilient.engine.saver import Saver
from resilient.policy.interval import SaveContext, mean_time_between_failures
from resilient.run.opening import Opened


def pace_of(opened: Opened, saver: Saver, *, step: int, saved_s: float, clock: Clock) -> SaveContext:
    """Return what is known after ``step`` complete steps; the save before began at ``saved_s`` of the same clock."""
    age_s = (clock.now() - datetime.fromisoformat(opened.created)).total_seconds()
    measured = saver.newest_committed is not None
    return SaveContext(
        step=step,
        since_save_s=clock.monotonic() - saved_s,
        stall_s=saver.stall_s if measured else None,
        persist_s=saver.persist_s if measured else None,
        mtbf_s=mean_time_between_failures(age_s, opened.claim.generation - 1),
    )
