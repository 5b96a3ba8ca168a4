"""The Python stacks of a process that may hang with the interpreter's lock held, and what they tell.

``faulthandler`` writes them from a signal handler in C, which needs no lock, to a file that the trainer has opened
before. Processes that it forks, such as the workers of a ``DataLoader``, inherit both.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sysconfig
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from resilient.clock import Clock, Deadline
from resilient.detect import proc
from resilient.policy.progress import EXCHANGE, MAY_WAIT, RUNNING, WAITS

_TIMEOUT_S: Final = 3.0
_QUIET_S: Final = 0.05
_POLL_S: Final = 0.01
_MOST_NBYTES: Final = 64 << 10
_SIGNATURE_FRAMES: Final = 3

_THREAD: Final = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')

_COLLECTIVE: Final = "/torch/distributed/"
_NO_COLLECTIVE: Final = ("/torch/distributed/tensor/", "/torch/distributed/optim/")
"""What computes on the way, and shows nothing of itself where it exchanges."""

_WORD_OF_A_RANK: Final = tuple(f"/resilient/engine/{name}.py" for name in ("peers", "key_values", "meeting"))
_SAVING: Final = ("/resilient/run/overlap.py", *(f"/resilient/engine/{name}.py" for name in ("stage", "saver")))
_BACKWARD: Final = "_engine_run_backward"
_OURS: Final = str(Path(__file__).parents[1])
_STANDARD: Final = sysconfig.get_path("stdlib")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    file: str
    function: str
    line: int


class StackFile:
    """Lets this process write its stacks to a file whenever it gets `signal`, until `close`.

    The handler stays for the life of the process: a signal that was sent before it went would end the process after.
    """

    def __init__(self, path: Path) -> None:
        """Make the file; raises OSError."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with _installing:
            if not _installed:
                number = _free_signal()
                if number:
                    faulthandler.register(number, file=self._file, all_threads=True)
                _installed.append((number, self._file))
            self.signal, self._handled = _installed[0]
            if self._handled != self._file:
                os.dup2(self._file, self._handled, inheritable=False)
                os.close(self._file)

    def close(self) -> None:
        """Write nothing any more. Workers that were forked go on."""
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, self._handled, inheritable=False)
        os.close(nowhere)


_installing: Final = threading.Lock()
_installed: Final[list[tuple[int, int]]] = []
"""The signal and the descriptor: a handler belongs to the process, whatever runs in it."""


def _free_signal() -> int:
    """Return a real-time signal that nobody in this process has a handler for; 0 if there is none."""
    for number in range(signal.SIGRTMAX - 2, signal.SIGRTMIN + 2, -1):
        if not proc.handles(os.getpid(), number):
            return number
    return 0


def take(pid: int, number: int, path: Path, clock: Clock) -> str:
    """Return the stacks of a process, newest call first; empty if it has none to give.

    Args:
        pid: one that writes to ``path`` when it gets signal ``number``; any other one is left alone.
        number: 0 if there is none.
        path: where it writes.
        clock: for the wait, of three seconds at most.
    """
    letter = proc.state(pid)
    if not number or not letter or letter in "TtZXD" or not proc.handles(pid, number):
        return ""
    try:
        before = size = path.stat().st_size
        os.kill(pid, number)
        deadline, quiet = Deadline(clock, _TIMEOUT_S), Deadline(clock, _TIMEOUT_S)
        while not deadline.expired and not quiet.expired:
            clock.sleep(_POLL_S)
            now = path.stat().st_size
            if now != size:
                size, quiet = now, Deadline(clock, _QUIET_S)
        with path.open("rb") as file:
            file.seek(before)
            return file.read(min(size - before, _MOST_NBYTES)).decode(errors="replace")
    except OSError:
        return ""  # it has ended meanwhile


def frames_of(text: str, thread: int) -> list[Frame]:
    """Return the stack of one thread, newest call first; that of the main thread, the last one, if it is not there."""
    threads: list[tuple[int, list[Frame]]] = []
    for line in text.splitlines():
        if begins := _THREAD.match(line):
            threads.append((int(begins[1], 16), []))
        elif (found := _FRAME.match(line)) and threads:
            threads[-1][1].append(Frame(file=found[1], line=int(found[2]), function=found[3]))
    for ident, frames in threads:
        if ident == thread:
            return frames
    return threads[-1][1] if threads else []


def waits(frames: Iterable[Frame]) -> int:
    """Say whether a stack waits for other ranks: see `resilient.policy.progress.Standing`.

    What counts is what the newest call of the program itself has called: a stack may well go through torch further out.
    """
    for frame in frames:
        if (_COLLECTIVE in frame.file and not any(each in frame.file for each in _NO_COLLECTIVE)) or any(
            each in frame.file for each in _WORD_OF_A_RANK
        ):
            return WAITS
        if frame.function == _BACKWARD:
            return MAY_WAIT
        if not _is_library(frame.file):
            return RUNNING
    return RUNNING


def section_of(frames: Iterable[Frame], section: str, steps: Iterable[str]) -> str:
    """Return the section that a rank hangs in, which within a step only its stack can tell: an exchange, or a save."""
    frames = list(frames)
    if section not in steps:
        return section
    if any(each in frame.file for frame in frames[:_SIGNATURE_FRAMES] for each in _SAVING):
        return "save"
    return EXCHANGE if waits(frames) == WAITS else section


def signature(frames: Iterable[Frame]) -> str:
    """Return what the stacks of ranks that do the same have in common: the functions of the newest calls."""
    return " < ".join(frame.function for frame in list(frames)[:_SIGNATURE_FRAMES])


def _is_library(file: str) -> bool:
    return "/torch/" in file or file.startswith(_OURS) or (file.startswith(_STANDARD) and "-packages/" not in file)
