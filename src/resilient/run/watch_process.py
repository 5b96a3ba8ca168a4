"""A watcher in a process of its own, as its trainer sees it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

import msgspec

from resilient.config import environment_with
from resilient.detect.watcher import DEAF, pack
from resilient.detect.words import Task, Word


class WatchProcess:
    """Starts a watcher; owns the process and the pipes to it. For one thread."""

    def __init__(self, task: Task) -> None:
        """Start it; raises OSError."""
        words = ["rank", str(task.rank), "of", "process", str(os.getpid())]
        # The same modules as here, wherever they come from; and none that happen to lie in the working directory.
        path = os.pathsep.join(os.path.abspath(each) for each in sys.path)  # noqa: PTH100 -- entries may be empty
        before = signal.pthread_sigmask(signal.SIG_BLOCK, DEAF)  # until it ignores them
        try:
            self._process = subprocess.Popen(  # noqa: S603 -- our own interpreter and module
                [sys.executable, "-P", "-m", "resilient.detect.watcher", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env=environment_with(PYTHONPATH=path),
                bufsize=0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._half = b""
        with suppress(BrokenPipeError):  # it has ended already: `hear` says so
            self._input.write(pack(task))

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear(self, timeout_s: float, wake: int | None = None) -> list[Word] | None:
        """Return what it has said, after that time at most, or once ``wake`` can be read; None once it has ended."""
        waiting: list[Any] = [self._output] if wake is None else [self._output, wake]
        ready, _, _ = select.select(waiting, [], [], timeout_s)
        if self._output not in ready:
            return []
        found = os.read(self._output.fileno(), 1 << 16)
        if not found:
            return None
        *lines, self._half = (self._half + found).split(b"\n")
        return [msgspec.json.decode(line, type=Word) for line in lines]

    def close(self, timeout_s: float) -> int:
        """Let it end, because the page is closed, and wait for that; one that does not is killed. Return its status."""
        with suppress(OSError):
            self._input.write(b".")  # not its end alone: loader workers may have inherited this side of the pipe
            self._input.close()
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            self._output.close()
