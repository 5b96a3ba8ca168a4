"""``python -m resilient.detect.watcher``: what a trainer starts to be watched by; of no use to people."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from resilient.detect.watching import Watching
from resilient.detect.words import Ready, Task, Word

DEAF: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What ends a trainer must not end who sees how it ends."""

_LENGTH_NBYTES: Final = 4


def pack(task: Task) -> bytes:
    """Return what a watcher reads first."""
    data = msgspec.msgpack.encode(task)
    return len(data).to_bytes(_LENGTH_NBYTES, "big") + data


def main(arguments: Sequence[str]) -> int:
    """Watch the trainer that started this process until it ends.

    The arguments are for people who look at a list of processes: ``rank 3 of process 1234``. The task comes on standard
    input, because the options of a store may hold secrets. What is found goes to standard output, as JSON lines.
    """
    faulthandler.enable()
    for number in DEAF:
        signal.signal(number, signal.SIG_IGN)
    trainer = int(arguments[4])
    length = int.from_bytes(_read(_LENGTH_NBYTES), "big")
    task = msgspec.msgpack.decode(_read(length), type=Task)
    if os.getppid() != trainer:
        return 0  # it was gone before this process had come so far
    os.set_blocking(sys.stdout.fileno(), False)  # a trainer that hangs reads nothing
    watching = Watching(task, _say)
    _say(Ready(pid=os.getpid()))
    watching.run(sys.stdin.fileno())
    return 0


def _say(word: Word) -> None:
    with suppress(OSError):  # it is in the journal
        os.write(sys.stdout.fileno(), msgspec.json.encode(word) + b"\n")


def _read(nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        more = os.read(sys.stdin.fileno(), nbytes - len(found))
        if not more:
            raise EOFError("the trainer was gone before it had said what to watch")
        found += more
    return found


if __name__ == "__main__":
    # Not the interpreter's own end, which would wait for the threads of a client library whose store is away.
    os._exit(main(sys.argv[1:]))
