"""torchrun, with an exit code that tells a job which was stopped and wants to go on from one that failed.

It is what ``resilient run`` becomes. torchrun itself ends with 1 when it was ended by a signal, also if every worker
has saved its state and asked to be started again.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from resilient.config import export
from resilient.errors import ResilientError

REQUEUE: Final = 75
"""The exit code that asks to be started again."""

_DONE: Final = "0"
_REPEATED: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_BEFORE_WORKERS: Final = (*_REPEATED, signal.SIGQUIT)


def main(arguments: Sequence[str]) -> int:
    """Run torchrun with these arguments; return the exit code, or raise what it raises for a job that failed."""
    for number in _BEFORE_WORKERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    # Imported with the handlers in place: it takes seconds, and nothing is lost yet.
    from torch.distributed import run as torchrun  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415

    _hear_once()
    sys.argv = ["torchrun", *arguments]  # where the rendezvous looks for the script
    with tempfile.TemporaryDirectory(prefix="resilient-exits-") as folder:
        export(RESILIENT_EXITS_DIR=folder)
        try:
            torchrun.main(list(arguments))
        except (SignalException, ChildFailedError) as error:
            notes, signalled = _notes(Path(folder)), isinstance(error, SignalException)
            if signalled and is_done(notes):
                _say("the signal to stop came when the training was about to end: it is done")
                return 0
            if not wants_requeue(notes, signalled=signalled):
                raise
            _say(f"stopped, and nothing is lost: exit code {REQUEUE} asks to be started again")
            return REQUEUE
        except ResilientError as error:  # the rendezvous refuses something: that is for people, not a traceback
            _say(f"{error} [{error.kind}]" + (f"\nhint: {error.hint}" if error.hint else ""))
            return error.exit_code
    return 0


def wants_requeue(notes: Sequence[str], *, signalled: bool) -> bool:
    """Say whether workers that left these notes were stopped, and did not fail.

    A note is empty if a training function had its state, and has ended in any way but by leaving. A worker that was
    ended before that has left none, and has lost nothing.
    """
    if any(note not in (_DONE, str(REQUEUE)) for note in notes):
        return False
    return str(REQUEUE) in notes or (signalled and not notes)


def is_done(notes: Sequence[str]) -> bool:
    """Say whether all training functions that left these notes have done their work, so that none is to be done."""
    return bool(notes) and all(note == _DONE for note in notes)


def _notes(folder: Path) -> list[str]:
    return [path.read_text(encoding="utf-8", errors="replace") for path in folder.iterdir()]


def _hear_once() -> None:
    """Let a second notice not cut short what the first one has begun.

    torchrun would give up waiting for its workers at the third signal, while they save, and schedulers send several:
    SLURM its own, then SIGTERM. SIGINT and SIGQUIT are from people, and count again.
    """
    from torch.distributed.elastic.multiprocessing import api  # noqa: PLC0415 -- as in `main`

    first = api._terminate_process_handler  # noqa: SLF001 -- there is no other way to what it does with a signal

    def hear(signum: int, frame: FrameType | None) -> None:
        for each in _REPEATED:
            if signal.getsignal(each) is hear:
                signal.signal(each, signal.SIG_IGN)
        # What a terminal says that goes away would end the workers, who stop for SIGTERM.
        first(signal.SIGTERM if signum == signal.SIGHUP else signum, frame)

    api._terminate_process_handler = hear  # noqa: SLF001 -- as above


def _leave(number: int, _: FrameType | None) -> NoReturn:
    _say(f"stopped by {signal.Signals(number).name} before the workers were started: exit code {REQUEUE}")
    raise SystemExit(REQUEUE)


def _say(what: str) -> None:
    print(f"resilient run: {what}", file=sys.stderr, flush=True)  # noqa: T201 -- the end of a command of the terminal


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
