"""How good a state is, as the program says it: kept until the save that it belongs to."""

from __future__ import annotations

import math
from typing import SupportsFloat

from resilient.run.misuse import misused


class Metrics:
    """What was reported since the last boundary.

    Numbers are taken when a save is made, so that a loss on an accelerator is not waited for at every step.
    """

    def __init__(self) -> None:
        self._values: dict[str, SupportsFloat] = {}

    def report(self, values: dict[str, SupportsFloat]) -> None:
        """Remember values; one of the same name takes the place of an earlier one."""
        for name, value in values.items():
            detached = value.detach() if hasattr(value, "detach") else value
            if not hasattr(detached, "__float__") or getattr(detached, "numel", lambda: 1)() != 1:
                raise misused(f"run.metrics({name}={type(value).__name__}) is no number", "pass a float or a scalar")
            self._values[name] = detached

    def take(self) -> dict[str, float]:
        """Return what goes into a save, and forget it; what is not finite says nothing, and is left out."""
        numbers = {name: float(value) for name, value in self._values.items()}
        self._values = {}
        return {name: value for name, value in numbers.items() if math.isfinite(value)}

    def forget(self) -> None:
        """Begin anew: the next turn has its own."""
        self._values = {}
