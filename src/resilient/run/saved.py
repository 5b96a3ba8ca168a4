"""How saving goes: what is saved, what is said of it at the end, and when to stop because too little is."""

from __future__ import annotations

from resilient.clock import Clock
from resilient.config import Settings
from resilient.engine.saver import Saver
from resilient.errors import ErrorKind, ResilientError, StoreError
from resilient.events import Bus, Event, SaveCommitted, SaveFailed, SaveSkipped, SaveStarted
from resilient.run.pace import Pace


class Saved:
    """Follows the saves of one life of a run."""

    def __init__(self, saver: Saver, settings: Settings, pace: Pace, *, bus: Bus, clock: Clock) -> None:
        self.pace = pace
        self._saver = saver
        self._settings = settings
        self._rank = pace.rank
        self._bus = bus
        self._clock = clock
        self._resumed: int | None = None
        self._tally = {"failed": 0, "skipped": 0}
        self._newest_s = clock.monotonic()  # when the newest committed state was that of the boundary
        self._started_s: dict[int, float] = {}
        bus.subscribe(self._count)

    def start(self, resumed: int | None) -> None:
        """Begin: training goes on from this step."""
        self._resumed = resumed
        self._newest_s = self._clock.monotonic()

    @property
    def newest(self) -> int | None:
        """The newest committed step."""
        return self._resumed if self._saver.newest_committed is None else self._saver.newest_committed

    def summary(self, step: int) -> str:
        """Return what a person should know at the end, after so many steps."""
        if self.newest is None:
            return "nothing is saved"
        if self.newest < step:
            return f"nothing was saved since step {self.newest}"
        return f"the newest committed step is {self.newest}"

    @property
    def counts(self) -> str:
        """How many saves failed and were skipped, in words; "" if none."""
        counts = ", ".join(f"{n} save{'s' * (n > 1)} {what}" for what, n in self._tally.items() if n)
        return counts and f" ({counts})"

    def skip(self, step: int, why: str) -> None:
        """Tell that a step which was due is not saved."""
        self._bus.emit(SaveSkipped(rank=self._rank, step=step, why=why))

    def check(self) -> None:
        """Raise if it makes no sense to go on; called at every boundary.

        Raises:
            StoreError: kind ``save-failed``: too many saves in a row have failed, or nothing was saved for too long.
            ConflictError: kind ``taken-over``: nothing that is saved here counts any more.
        """
        failures, error = self._saver.failures, self._saver.last_error
        if failures and isinstance(error, ResilientError) and error.kind is ErrorKind.TAKEN_OVER:
            raise error  # another save would be as void: every further step is work for nothing
        newest = "nothing is saved" if self.newest is None else f"the newest committed step is {self.newest}"
        if failures >= self._settings.max_failed_saves:
            what, setting = f"{failures} saves in a row failed", "max_failed_saves says how many are borne"
        elif self._is_too_old():
            age_s = self._clock.monotonic() - self._newest_s
            what, setting = f"nothing was saved for {age_s:.0f} s", "max_unsaved says how long that is borne"
        else:
            return
        raise StoreError(
            f"{what}; {newest}",
            kind=ErrorKind.SAVE_FAILED,
            hint=f"the last error is above; {setting}",
            rank=self._rank,
        ) from error

    def _is_too_old(self) -> bool:
        """Say whether the newest committed state is too old and saving does not work.

        Not if no save was due since: how often that is, is for the policy.
        """
        limit_s, now_s = self._settings.max_unsaved, self._clock.monotonic()
        if limit_s is None or now_s - self._newest_s <= limit_s:
            return False
        return self._saver.failures > 0 or now_s - min(self._started_s.copy().values(), default=now_s) > limit_s

    def _count(self, event: Event) -> None:
        match event:
            case SaveStarted():
                self._started_s[event.step] = self._clock.monotonic() - event.stall_s
            case SaveCommitted():
                started_s = self._started_s.pop(event.step, None)
                self._newest_s = self._newest_s if started_s is None else max(self._newest_s, started_s)
            case SaveFailed():
                self._started_s.pop(event.step, None)
                self._tally["failed"] += 1
            case SaveSkipped():
                self._tally["skipped"] += 1


def nothing_to_do(step: int, total: int | None) -> str:
    """Say why a run that was started has no step to make."""
    passed = total is not None and total < step
    what = f"total={total} is passed: the run is" if passed else "the run is complete"
    return f"nothing to do: {what} at step {step}"
