"""Asking a slow source again and again, in a thread of its own, so that nobody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from resilient.detect.notice import Notice, Source

_JOIN_S: Final = 0.5


class Poller:
    """Keeps in ``newest`` what a source says now.

    A source that does not answer says nothing: not even that what it has said before does not hold any more. That it
    does not answer is told once, and again after it has.
    """

    def __init__(self, source: Source, every_s: float, *, notice: Callable[[str], None]) -> None:
        self.newest: Notice | None = None
        self._source = source
        self._every_s = every_s
        self._notice = notice
        self._silent = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resilient-notices", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ask no more; a question that is under way is not waited for."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def ask(self) -> None:
        """Ask once."""
        try:
            self.newest = self._source.poll()
            self._silent = False
        except Exception as error:  # noqa: BLE001 -- thread main: a source that is not understood once is asked again
            if not self._silent:
                self._notice(f"{self._source.name} does not say whether to stop: {type(error).__name__}: {error}")
            self._silent = True

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self.ask()
