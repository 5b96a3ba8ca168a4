"""Which process this is, and whether another one of this machine still lives."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol


class Simulated(Protocol):
    """A process that is played in this one: it has a machine and chance of its own, and may start no threads."""

    @property
    def host(self) -> str:
        """The name of its machine."""
        ...

    @property
    def started(self) -> str:
        """What tells it from all others."""
        ...

    def lives(self, other_host: str, other_started: str) -> bool | None:
        """Say whether another one still lives; None if that cannot be seen from its machine."""
        ...

    def token(self) -> str:
        """Return 16 hex digits that nobody else has."""
        ...


_played: ContextVar[Simulated | None] = ContextVar("resilient-played-process", default=None)

_PROC = Path("/proc")
_START_FIELD = 19  # of /proc/PID/stat, counted from the state, which follows the parenthesized name


@contextmanager
def playing(process: Simulated) -> Iterator[None]:
    """Be that process in this context, for the catalogue: a simulation runs thousands of them in one."""
    token = _played.set(process)
    try:
        yield
    finally:
        _played.reset(token)


def played() -> Simulated | None:
    """Return the process that is played here; None outside of simulations."""
    return _played.get()


def nonce() -> str:
    """Return 16 hex digits that nobody else has."""
    process = played()
    return secrets.token_hex(8) if process is None else process.token()


def host() -> str:
    """Return the name of this machine."""
    process = played()
    return socket.gethostname() if process is None else process.host


def started(pid: int) -> str:
    """Return what tells a process from a later one of the same number: boot, process id namespace, and start time.

    Empty if there is no such process, or if this system does not say.
    """
    process = played()
    if process is not None:
        return process.started
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
    process = played()
    if process is not None:
        return process.lives(other_host, process_started)
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
