"""How a training function ends that was asked to stop."""

from __future__ import annotations

from resilient.elastic.torchrun import REQUEUE


class Stopped(SystemExit):
    """Ends the process with the code for "start me again". ``together``: every rank has taken leave of the others."""

    def __init__(self, *, together: bool) -> None:
        super().__init__(REQUEUE)
        self.together = together
