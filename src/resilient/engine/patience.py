"""When a writer that says nothing counts as hanging."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from resilient.clock import Clock, Deadline
from resilient.engine.saving import Saving

_TAKE_S: Final = 60.0
"""How long the writer may not say that it has taken an order, which needs no work, before it counts as hanging."""
_GRACE_S: Final = 30.0
"""How much longer than a save may take the writer may be silent, before it counts as hanging."""


class Patience:
    """How long one writer may be silent with saves in hand."""

    def __init__(self, commit_timeout_s: float, clock: Clock) -> None:
        self._commit_timeout_s = commit_timeout_s
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Begin anew: it has said something, or has been given something."""
        self._silence = Deadline(self._clock, self._commit_timeout_s + _GRACE_S)

    def at_an_end(self, in_flight: Iterable[Saving]) -> str | None:
        """Say why a writer that has these saves in hand is held for hanging; None if it is not."""
        if self._silence.expired:
            return f"has said nothing for {self._silence.timeout_s:g} s"
        if any(self._is_ignored(saving) for saving in in_flight):
            return f"has not taken an order within {_TAKE_S:g} s"
        return None

    def _is_ignored(self, saving: Saving) -> bool:
        ordered_s, taken = saving.ordered_s, saving.handle.staged.done()
        return ordered_s is not None and not taken and self._clock.monotonic() - ordered_s > _TAKE_S
