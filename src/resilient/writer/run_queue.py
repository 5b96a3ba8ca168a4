"""How long this process has waited for a processor: what was slow because of that says nothing of the store.

The writer yields to training, so that beside a training that leaves no processor idle it waits for most of the time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_TASKS: Final = Path("/proc/self/task")


class RunQueue:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._before = _waited_ns()

    def waited_s(self) -> float:
        """Return for how many seconds the thread that waited longest was ready to run, and did not.

        0 where the kernel does not count that (no CONFIG_SCHED_INFO).
        """
        return max((now - self._before.get(task, 0) for task, now in _waited_ns().items()), default=0) / 1e9


def _waited_ns() -> dict[str, int]:
    found = {}
    try:
        for task in _TASKS.iterdir():
            found[task.name] = int((task / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):  # a thread that has just ended, or a kernel that counts nothing
        pass
    return found
