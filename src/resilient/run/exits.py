"""How a worker ended, for the launcher: torchrun ends with 1 whatever its workers had to say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resilient.config import Process


@contextmanager
def exit_noted(process: Process) -> Iterator[None]:
    """Write down that a training function has begun, and the code with which it leaves, if it comes to that.

    In a file of this local rank, which the next life of the rank writes anew; see `resilient.elastic.torchrun`.
    """
    if process.exits_dir is None:
        yield
        return
    note = Path(process.exits_dir) / str(process.local_rank)
    note.write_text("", encoding="ascii")
    try:
        yield
    except SystemExit as leaving:
        note.write_text("0" if leaving.code is None else str(leaving.code)[:3], encoding="utf-8")
        raise
    note.write_text("0", encoding="ascii")
