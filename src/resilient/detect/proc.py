"""What the kernel says of a process of this machine; nothing where there is no ``/proc``, or no right to look."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_CATCHES: Final = "SigCgt:"


def state(pid: int) -> str:
    """Return the state of a process as one letter (R, S, D, T, t, Z, X); empty if there is no such process."""
    return _read(f"{pid}/stat").rpartition(")")[2].strip()[:1]


def is_stopped(letter: str) -> bool:
    """Say whether that state is that of a process which a signal or a debugger has stopped."""
    return letter in ("T", "t")


def waits_in(pid: int) -> str:
    """Return the kernel function that a process sleeps in; empty if it runs, or if the kernel does not say."""
    found = _read(f"{pid}/wchan").strip()
    return "" if found == "0" else found


def kernel_stack(pid: int) -> str:
    """Return the kernel's stack of a process; empty unless this user may read it."""
    return _read(f"{pid}/stack")


def command(pid: int) -> str:
    """Return by which words a process was started."""
    return " ".join(filter(None, _read(f"{pid}/cmdline").split("\0")))


def children(pid: int) -> list[int]:
    """Return the processes that any thread of a process has started and that still exist."""
    try:
        threads = sorted((_PROC / str(pid) / "task").iterdir())
    except OSError:
        return []
    return sorted({int(word) for each in threads for word in _read(f"{pid}/task/{each.name}/children").split()})


def handles(pid: int, number: int) -> bool:
    """Say whether a process has a handler for a signal, so that it does not die of it."""
    for line in _read(f"{pid}/status").splitlines():
        if line.startswith(_CATCHES):
            return bool(int(line.removeprefix(_CATCHES), 16) >> (number - 1) & 1)
    return False


def _read(name: str) -> str:
    try:
        return (_PROC / name).read_text(errors="replace")
    except OSError:
        return ""
