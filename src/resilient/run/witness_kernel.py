"""What the kernel says: which boot of which machine this is, who was killed for want of memory, how a process ended."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_STATE_FIELD: Final = 0  # of /proc/PID/stat, counted from the state, which follows the parenthesized name
_EXIT_CODE_FIELD: Final = 49
_TAIL_NBYTES: Final = 16 << 10
_TAIL_LINES: Final = 40


def boot() -> str:
    """Return what is the same for all processes whose monotonic clocks can be compared."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def oom_kills() -> int:
    """Return how often the kernel has killed for want of memory, on this machine and in this cgroup; 0 if unknown."""
    return _counter(_PROC / "vmstat") + sum(_counter(path) for path in _of_cgroups())


def stderr_file() -> str:
    """Return the file that the standard error of this process, and not that of its parent, goes to; "" if none does.

    Where a launcher sends all ranks to one file or terminal, its lines are not this rank's.
    """
    with suppress(OSError):
        mine = (_PROC / "self/fd/2").readlink()
        theirs = (_PROC / str(os.getppid()) / "fd/2").readlink()
        if mine != theirs and mine.is_file():
            return str(mine)
    return ""


def tail(path: str) -> tuple[str, ...]:
    """Return the last lines of a file; none if it cannot be read."""
    if not path:
        return ()
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_NBYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ()
    return tuple(line.rstrip() for line in text.splitlines() if line.strip())[-_TAIL_LINES:]


def await_end(files: Sequence[int], stop: int) -> list[int]:
    """Return those of these pidfds whose process has ended, as soon as one has; none once ``stop`` can be read."""
    poll = select.poll()
    for file in (*files, stop):
        poll.register(file, select.POLLIN)
    ready = {file for file, _ in poll.poll()}
    return [] if stop in ready else [file for file in files if file in ready]


def how_ended(pid: int) -> str:
    """Return how a process ended that its parent has not yet waited for: "SIGKILL", "exit code 3"; "" if unknown.

    Any process of the same user may read that, but only in the moment before the parent does.
    """
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    if len(fields) <= _EXIT_CODE_FIELD or fields[_STATE_FIELD] not in {"Z", "X"}:
        return ""
    status = int(fields[_EXIT_CODE_FIELD])
    if os.WIFSIGNALED(status):
        with suppress(ValueError):
            return signal.Signals(os.WTERMSIG(status)).name
        return f"signal {os.WTERMSIG(status)}"
    return f"exit code {os.WEXITSTATUS(status)}"


def _of_cgroups() -> list[Path]:
    """Return where version 2 and version 1 count the kills of this process's cgroup."""
    found = []
    with suppress(OSError):
        for line in (_PROC / "self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                found += [_CGROUPS / path.lstrip("/") / "memory.events", _CGROUPS / "memory.events"]
            elif controllers == "memory":
                found += [_CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control"]
    return list(dict.fromkeys(found))


def _counter(path: Path) -> int:
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0
