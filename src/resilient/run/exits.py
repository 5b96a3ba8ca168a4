"""How a worker ended, for the launcher: torchrun ends with 1 whatever its workers had to say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resilient.config import Process


@contextmanager
def exit_noted(process: Process) -> Iterator[None]:
    """Write down the code with which a training function leaves, if it comes to that.

    In a file of this local rank, which the next life of the rank writes anew; see `resilient.elastic.torchrun`.
    """
    if process.exits_dir is None:
        yield
        return
    note = _note(process)
    note.unlink(missing_ok=True)  # of the life before
    try:
        yield
    except SystemExit as leaving:
        note.write_text("0" if leaving.code is None else str(leaving.code)[:3], encoding="utf-8")
        raise
    note.write_text("0", encoding="ascii")


def note_begun(process: Process) -> None:
    """Write down that steps may be lost from now on, which a rank that leaves no code has not saved.

    Not before: whoever is ended while it joins the others or brings back its state has nothing to lose.
    """
    if process.exits_dir is not None:
        _note(process).write_text("", encoding="ascii")


def _note(process: Process) -> Path:
    assert process.exits_dir is not None
    return Path(process.exits_dir) / str(process.local_rank)
