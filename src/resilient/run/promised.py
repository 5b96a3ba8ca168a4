"""The share of productive time that was promised: looked at now and then, and told where it is not delivered."""

from __future__ import annotations

from typing import Final

from resilient.clock import Clock
from resilient.config import Settings
from resilient.errors import ResilientError
from resilient.events import Bus, ShareLooked, ShareMissed
from resilient.report.account import read_ledger
from resilient.run.opening import Opened

_FIRST_S: Final = 300.0
"""Before that nothing can be said: a start takes minutes, and the share grows with every step after it."""

_LEAST_S: Final = 60.0
_SHARE: Final = 0.002
"""Of the time that looking may take."""


class Promised:
    """Rank 0 reads the account of the run from the store, as anybody can, and says once when the share has fallen."""

    def __init__(self, opened: Opened, settings: Settings, *, bus: Bus, clock: Clock) -> None:
        self._store = opened.store
        self._bus = bus
        self._clock = clock
        self._looks = settings.sla is not None and opened.peers.rank == 0
        self._next_s = 0.0
        self._missed = False

    def due(self, began_s: float) -> bool:
        """Say whether it is time to look; ``began_s``: when this life began."""
        return self._looks and self._clock.monotonic() >= max(self._next_s, began_s + _FIRST_S)

    def look(self, began_s: float) -> None:
        """Look, if it is time to."""
        if not self.due(began_s):
            return
        now_s = self._clock.monotonic()
        try:
            promise = read_ledger(self._store, clock=self._clock, machines=False).promise
        except ResilientError:
            promise = None  # a store that is away is told of already
        took_s = self._clock.monotonic() - now_s
        self._next_s = now_s + max(_LEAST_S, took_s / _SHARE)
        if promise is None:
            return
        self._bus.emit(ShareLooked(promised=promise.promised, delivered=promise.delivered))
        missed = promise.delivered < promise.promised
        if missed and not self._missed:
            largest = "" if promise.largest is None else str(promise.largest)
            self._bus.emit(
                ShareMissed(
                    promised=promise.promised, delivered=promise.delivered, largest=largest, message=promise.message
                )
            )
        self._missed = missed
