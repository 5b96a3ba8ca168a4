"""Saves that wait for gradients to be used: between micro-batches these are state that no checkpoint has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from resilient.run.boundary import BoundaryWatch

_MOST: Final = 100  # boundaries for which an owed save waits for gradients that a GAN would never use


class Deferral:
    """Says whether an owed save has to wait; not for ever for gradients that may never be used."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._deferred = 0

    def waits(self, watch: BoundaryWatch) -> bool:
        """Say whether gradients are pending for which a save has to wait, at one boundary after another."""
        if not watch.pending():
            self._deferred = 0
            return False
        self._deferred = self._deferred + 1 if watch.only_left() else 0
        if self._deferred <= _MOST:
            return True
        watch.disregard_left()
        self._notice(
            f"a save has waited for {_MOST} steps for gradients that another optimizer's step left: from now on they"
            f" are taken for discarded and are not saved; {watch.advice()}"
        )
        return False
