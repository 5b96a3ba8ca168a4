"""Finishing what is in flight when the program ends, before the interpreter takes its threads away."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable


def before_threads_end(call: Callable[[], object]) -> None:
    """Call something when the main thread has ended, while threads and executors can still be started.

    ``atexit`` is too late: executors refuse work from the moment at which the interpreter begins to wait for threads
    (python/cpython#80961), so that a save in flight to an object store would fail in its last requests. The hook that
    the standard library's own executors use has no public name; it calls the latest first.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    register(call)
