"""What a program and all its processes take: processor time and memory, those that have left its session included.

The program makes itself the one that adopts orphans, so a writer process that outlives its trainer is still found
below it. Processor time of the kernel's own threads, such as those that write out the page cache, belongs to nobody
and is not in these figures.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Self

_PR_SET_CHILD_SUBREAPER = 36
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(root: int) -> list[int]:
    """Return a process and all below it."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))):
            children[int(fields[1])].append(int(entry.name))
    found = [root]
    for process in found:
        found += children[process]
    return found


def name_of(process: int) -> str:
    """Return the command line of a process, or an empty string if it is gone."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def cpu_s(root: int) -> float:
    """Return the processor seconds that a process and all below it have used so far, ended ones included."""
    return sum(cpu_s_of(process) for process in descendants(root))


def cpu_s_of(process: int) -> float:
    """Return the processor seconds of one process, and of those children of it that it has waited for."""
    fields = _stat(process)
    if fields is None:
        return 0.0
    ended_s = (int(fields[13]) + int(fields[14])) * _TICK_S
    try:
        # The clock of another process's processor time, as clock_getcpuclockid(3) makes it: in nanoseconds.
        return time.clock_gettime((~process << 3) | 2) + ended_s
    except OSError:  # a process that has ended and nobody has waited for has no clock any more
        return (int(fields[11]) + int(fields[12])) * _TICK_S + ended_s


def memory(root: int) -> int:
    """Return the bytes of memory of a process and all below it; what they share is counted once."""
    return sum(_rollup(process, "Pss:") for process in descendants(root))


def shared_memory(root: int) -> int:
    """Return the part of `memory` that is shared memory."""
    return sum(_rollup(process, "Pss_Shmem:") for process in descendants(root))


def open_files(root: int) -> int:
    """Return the number of open files of a process and all below it."""
    return sum(_entries(f"/proc/{process}/fd") for process in descendants(root))


def threads(root: int) -> int:
    """Return the number of threads of a process and all below it."""
    return sum(_entries(f"/proc/{process}/task") for process in descendants(root))


class PeakMemory:
    """Looks at the memory of a process tree again and again; ``nbytes`` is the most that was seen.

    Walks page tables: a process that is looked at is slower, so nothing is timed meanwhile.
    """

    def __init__(self, root: int, *, every_s: float = 0.02) -> None:
        self.nbytes = 0
        self._root = root
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(self._every_s):
            self.nbytes = max(self.nbytes, memory(self._root))


def wait_until_alone(timeout_s: float = 30.0) -> None:
    """Wait for the orphans that this process has adopted; a writer process ends a few seconds after its last save.

    Raises:
        TimeoutError: some are still there, named.
    """
    end_s = time.monotonic() + timeout_s
    while others := list(_living_children()):
        if time.monotonic() > end_s:
            names = ", ".join(map(name_of, others))
            for process in others:
                os.kill(process, signal.SIGKILL)
            raise TimeoutError(f"still alive after {timeout_s:g} s, and killed now: {names}")
        time.sleep(0.05)


def _living_children() -> Iterator[int]:
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if ended == 0:
            break
    for process in descendants(os.getpid())[1:]:
        if (fields := _stat(process)) and fields[0] != "Z":
            yield process


def _stat(process: int) -> list[str] | None:
    """Return the fields of /proc/<process>/stat from the third on; None if it is gone."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _rollup(process: int, name: str) -> int:
    """Return a figure of /proc/<process>/smaps_rollup in bytes; 0 if the process is gone."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(name)), 0)


def _entries(folder: str) -> int:
    try:
        return sum(1 for _ in os.scandir(folder))
    except OSError:
        return 0
