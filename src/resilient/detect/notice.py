"""What a source of stop requests says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Somebody wants this process to stop, or will take its machine away.

    ``within_s``: so long after the notice the process is ended by force; None if nobody will. ``early``: it is likely
    to be wanted soon, no more.
    """

    why: str
    kind: Literal["stop", "resize"] = "stop"
    within_s: float | None = None
    early: bool = False


class Source(Protocol):
    """What can be asked again and again; a call may take seconds."""

    name: str

    def poll(self) -> Notice | None:
        """Return what holds now: a notice may be withdrawn.

        Raises:
            OSError: no answer.
            ValueError: an answer that makes no sense.
        """
        ...
