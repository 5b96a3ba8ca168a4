"""Which process this is, and whether another one of this machine still lives."""

from __future__ import annotations

import socket
from pathlib import Path

_PROC = Path("/proc")
_START_FIELD = 19  # of /proc/PID/stat, counted from the state, which follows the parenthesized name


def host() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


def started(pid: int) -> str:
    """Return what tells a process from a later one of the same number: boot, process id namespace, and start time.

    Empty if there is no such process, or if this system does not say.
    """
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    if len(fields) <= _START_FIELD or fields[0] in {"Z", "X"}:
        return ""  # a zombie has ended; only its parent has not noticed
    return f"{_scope()}/{fields[_START_FIELD]}"


def lives(other_host: str, pid: int, process_started: str) -> bool | None:
    """Say whether a process that introduced itself by `host`, its id and `started` still lives.

    None if that cannot be seen from here: another machine, another container, or a system without ``/proc``.
    """
    scope = process_started.rpartition("/")[0]
    if other_host != host() or not scope or scope != _scope():
        return None
    return started(pid) == process_started


def _scope() -> str:
    """Return what process ids are unique in: two containers may share a host name and not their processes."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").readlink()
    except OSError:
        return ""
    return f"{boot}/{namespace}"
