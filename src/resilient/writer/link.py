"""What a trainer has of its writer."""

from __future__ import annotations

from typing import Protocol

from resilient.writer.messages import Save, Structure


class WriterLink(Protocol):
    """Takes orders, and answers through the callable that it was made with, one answer at a time, on its own thread.

    An order to a writer that is gone raises `PeerError` (kind ``peer-failed``), or is followed by `Died`.
    """

    @property
    def alive(self) -> bool:
        """Whether it takes orders."""
        ...

    def wait_ready(self, timeout_s: float) -> None:
        """Return when the writer has shown that it works; raise `PeerError` if it ends first, or takes longer."""
        ...

    def define(self, structure: Structure) -> None:
        """Describe a structure, before the first save that names it. The 32 that were used last are remembered."""
        ...

    def save(self, order: Save) -> None:
        """Order a save of what is staged; `Taken` says that it was understood."""
        ...

    def abandon(self, step: int, why: str) -> None:
        """Stop waiting for a step that another rank cannot save."""
        ...

    def kill(self) -> None:
        """End a writer that hangs: `Died` follows, for all that it has not answered."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Let it finish what was ordered and end; say whether it has, in that time. Idempotent."""
        ...
