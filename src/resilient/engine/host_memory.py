"""How much memory this process may still take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from resilient.policy.memory import Limit, available

_ROOT: Final = Path("/")
_UNLIMITED: Final = 1 << 60


def available_nbytes(local_ranks: int = 1, *, root: Path = _ROOT) -> int:
    """Return what is free on the host and in every control group that this process is in, shared by the local ranks."""
    free = _fields(root / "proc/meminfo").get("MemAvailable", _UNLIMITED >> 10) << 10
    return available(free, _limits(root), local_ranks=local_ranks)


def _limits(root: Path) -> Iterator[Limit]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # A container may see its own group as the root, under the path that the host knows: all that are there count.
        inside = Path(path.lstrip("/"))
        for group in (base / inside, *(base / parent for parent in inside.parents)):
            limit, used = (_text(group / name).strip() for name in names[:2])
            if limit.isdecimal() and used.isdecimal() and int(limit) < _UNLIMITED:
                reclaimable = _fields(group / "memory.stat").get(names[2], 0)
                yield Limit(nbytes=int(limit), used=int(used), reclaimable=reclaimable)


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number a line."""
    pairs = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # not this kind of system, or not visible from here
