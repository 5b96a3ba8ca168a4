"""What a trainer has of its writer."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Protocol

from resilient.writer.messages import Answer, Save, Structure


class WriterLink(Protocol):
    """Takes orders, and answers through the callable that it was made with, one answer at a time, on its own thread.

    An order to a writer that is gone raises `PeerError` (kind ``peer-failed``), or is followed by `Died`, which is the
    last answer.
    """

    @property
    def alive(self) -> bool:
        """Whether it takes orders. If it is gone unasked, `Died` has been heard before this is False.

        So what another writer is ordered then is not among what this one takes with it.
        """
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


def tell(heard: Callable[[Answer], None], answer: Answer) -> None:
    """Hand over an answer; what that raises is reported as the end of a thread is, and ends none.

    It may be an exception of a callback of the user's. Whoever waits for the answers that follow must get them.
    """
    try:
        heard(answer)
    except BaseException:  # noqa: BLE001 -- boundary: thread main, reported by the hook for threads
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
