"""Signals that ask for an end, noticed at once and beside what the program itself does with them.

A handler in Python runs on the main thread, and only between two of its instructions: not while it is in a long call
into native code, such as a collective that waits for another rank. So the interpreter's wake-up descriptor is used,
too: it is written to the moment the signal comes, and any thread may read it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeAlias

_Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int | None

_CATCHES: Final = "SigCgt:"


class StopSignals:
    """Notices some signals from `install` to `close`; what handled them before is called as well, and put back then.

    The handlers take no lock, write nothing and raise nothing: what they interrupt may be anything. The first SIGINT
    asks for an end like the others; with the second one Python's own handler raises `KeyboardInterrupt`.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers: tuple[int, ...] = ()
        self._wanted = tuple(numbers)
        self._process = os.getpid()
        self._before: dict[int, _Handler] = {}
        self._called: deque[int] = deque()
        self._interrupted = False
        self._woken, self._wakes = socket.socketpair()
        self._woken.setblocking(False)
        self._wakes.setblocking(False)
        self._poll = select.poll()  # not select(), which knows no descriptor beyond 1023
        self._poll.register(self._woken, select.POLLIN)
        self._wakes_before = -1
        self._waking = False

    def install(self) -> list[int]:
        """Begin; return the signals that are left as they are.

        Those that are ignored, and those that native code handles, which cannot be called from here; all of them,
        unless this is the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            return list(self._wanted)
        native = _caught()
        for number in self._wanted:
            before = signal.getsignal(number)
            if before is signal.SIG_IGN or before is None or (before is signal.SIG_DFL and number in native):
                continue
            self._before[number] = signal.signal(number, self._hear)
        self.numbers = tuple(self._before)
        if self.numbers:
            self._wakes_before = signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
            self._waking = True
            _installed.add(self)
        return [number for number in self._wanted if number not in self._before]

    def wait(self, timeout_s: float) -> set[int]:
        """Return the signals that have come since the last call; wait so long for one. For any one thread."""
        heard: set[int] = set()
        with suppress(OSError):  # nothing has come, or it was closed meanwhile
            self._poll.poll(1000 * timeout_s)
            heard.update(self._woken.recv(4096))
        if heard and self._wakes_before != -1:
            with suppress(OSError):
                os.write(self._wakes_before, bytes(heard - {0}))  # whoever listened before us
        while self._called:
            heard.add(self._called.popleft())
        return heard.intersection(self.numbers)

    def wake(self) -> None:
        """End a `wait`."""
        with suppress(OSError):
            self._wakes.send(b"\0")

    def restore(self, *, ignore: bool = False) -> None:
        """Put back what was there before; the program's later choice is left alone. In the main thread.

        ``ignore``: instead of what would end the process; for one that is ending.
        """
        _installed.discard(self)
        if threading.current_thread() is not threading.main_thread():
            return
        if self._waking:
            mine = signal.set_wakeup_fd(self._wakes_before, warn_on_full_buffer=False)
            if mine not in (self._wakes.fileno(), -1):
                signal.set_wakeup_fd(mine)
            self._waking = False
        for number, before in self._before.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, signal.SIG_IGN if ignore and before is signal.SIG_DFL else before)
        self._before = {}

    def close(self) -> None:
        """Restore, and give the descriptors back, once nobody waits any more."""
        self.restore()
        self._woken.close()
        self._wakes.close()

    def forget_in_child(self) -> None:
        """In a process that was just forked: as if this object had not been, also for whoever shares descriptors."""
        if os.getpid() != self._process and self._waking:
            signal.set_wakeup_fd(-1)
            self._waking = False
            for number, before in self._before.items():
                signal.signal(number, before)
            self._before = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return
        self._called.append(number)
        self.wake()
        before = self._before.get(number)
        if before is signal.default_int_handler and not self._interrupted:
            self._interrupted = True
        elif callable(before):
            before(number, frame)


_installed: weakref.WeakSet[StopSignals] = weakref.WeakSet()


def _forget_all() -> None:
    for each in list(_installed):
        each.forget_in_child()
    _installed.clear()


os.register_at_fork(after_in_child=_forget_all)


def _caught() -> set[int]:
    """Return the signals for which this process has any handler, as the system sees it."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return set()
    mask = next((int(line.removeprefix(_CATCHES), 16) for line in lines if line.startswith(_CATCHES)), 0)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}
