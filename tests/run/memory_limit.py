"""A limit on the memory of a command and all that it starts: a control group, as a container has. Needs root."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


def why_not() -> str | None:
    """Say why there can be no limit here; None if there can."""
    if os.geteuid() != 0:
        return "a limit of memory needs root"
    try:
        with limited(1 << 30):
            return None
    except OSError as error:
        return f"no control group can be made: {error}"


@contextmanager
def limited(nbytes: int) -> Iterator[list[str]]:
    """Yield what to put before a command."""
    base, name = (_V1, "memory.limit_in_bytes") if _V1.is_dir() else (_V2, "memory.max")
    group = base / f"resilient-test-{os.getpid()}-{time.monotonic_ns()}"
    group.mkdir()
    try:
        (group / name).write_text(str(nbytes))
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    finally:
        for _ in range(100):  # until all that was started in it has ended
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)
