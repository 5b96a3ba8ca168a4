"""Where the callbacks of users run: on a thread that no save waits for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Callbacks:
    """Runs callbacks, one after another, on a thread of its own, which is there from the first of them on.

    A callback may take as long as it likes, and wait for other saves, but not for other callbacks. What it raises is
    reported as the end of a thread is, and ends none.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()  # a signal's handler may come here in the middle of it

    def call(self, callback: Callable[[], object]) -> None:
        """Have something called; return at once."""
        with self._lock:
            self._calls.put(callback)
            if self._thread is None:
                # A daemon: a callback that never returns must not keep the process from ending.
                self._thread = threading.Thread(target=self._work, name="resilient-callbacks", daemon=True)
                self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Wait for the callbacks that are due; say whether they have all returned. Idempotent."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._calls.put(None)
        thread.join(timeout_s)
        return not thread.is_alive()

    def _work(self) -> None:
        while (callback := self._calls.get()) is not None:
            try:
                callback()
            except BaseException:  # noqa: BLE001 -- boundary: thread main, reported by the hook for threads
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            del callback  # it holds what it was about


class Stage(Future[T]):
    """A future that leaves its callbacks to something else than the thread which completes it."""

    def __init__(self, call: Callable[[Callable[[], object]], object]) -> None:
        super().__init__()
        self._call = call
        self.set_running_or_notify_cancel()  # a save cannot be called back, and `cancel` says so

    def add_done_callback(self, fn: Callable[[Future[T]], Any]) -> None:
        """Have ``fn`` called with this future when it is complete, or soon if it is; in the order of completion."""
        super().add_done_callback(lambda _: self._call(lambda: fn(self)))
