"""Programs in processes of their own, on one rank or several: started, told to begin, and their results read.

Such a program says "ready", begins when a line comes in, says "done" when what is measured is over, and prints its
result, one JSON document, as its last line.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

from processes import PeakMemory, memory, wait_until_alone

LIMIT_S = 900.0
_FIGURES = "FIGURES "


class ChildError(Exception):
    """A program gave no result; the message is the end of what it said."""


class Child:
    """One rank of a program; killed when it takes too long, or when this is closed."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed by close
        self._process = subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._limit = threading.Timer(LIMIT_S, self._process.kill)
        self._limit.daemon = True
        self._limit.start()

    def hear(self, word: str) -> None:
        """Wait for a word of the program."""
        if self._line() != word:
            raise self._error(f"it never came to {word!r}")

    def go(self) -> None:
        """Let the program begin."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        """Wait for the end of the program and return its result."""
        line = self._line()
        if self._process.wait() != 0 or not line:
            raise self._error(f"it ended with {self._process.returncode}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._limit.cancel()
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def _error(self, what: str) -> ChildError:
        self._log.seek(0)
        return ChildError(f"{what}: {self._log.read().strip()[-400:] or 'it said nothing'}")


def run_ranks(command: Sequence[str], ranks: int = 1, *, watched: bool = False) -> tuple[list[Any], int]:
    """Run a program on some ranks to its end, writer processes that outlive it included.

    Returns:
        The result of each rank, and, if ``watched``, the most memory that was taken after "ready", in bytes, on top of
        what was taken then.

    Raises:
        ChildError: a rank gave no result.
    """
    port = str(_free_port())
    children: list[Child] = []
    try:
        children += (Child(command, _launched(rank, ranks, port)) for rank in range(ranks))
        for child in children:
            child.hear("ready")
        before = memory(os.getpid()) if watched else 0
        with PeakMemory(os.getpid()) if watched else nullcontext() as peak:
            for child in children:
                child.go()
            for child in children:
                child.hear("done")
        results = [child.result() for child in children]
    finally:
        for child in children:
            child.__exit__()
        wait_until_alone()
    return results, peak.nbytes - before if peak is not None else 0


@contextmanager
def empty_folder(base: Path) -> Iterator[Path]:
    """Make a folder on the disk that is measured; it is removed in the end, also when this program is told to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    base.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=base)).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def ready_steady() -> None:
    """Say, as such a program, that all is prepared; return when it is to begin."""
    print("ready", flush=True)
    sys.stdin.readline()


def done() -> None:
    """Say, as such a program, that what is measured is over."""
    print("done", flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _launched(rank: int, ranks: int, port: str) -> dict[str, str]:
    """Return what a launcher says to a rank; nothing if there is only one: it is a plain program then."""
    if ranks == 1:
        return {"BENCH_PORT": port}
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def figures_of(command: Sequence[str], ranks: int) -> list[dict[str, Any]]:
    """Run a program under torchrun to its end; return what each rank has told by `tell_figures`."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*launch, *command], capture_output=True, text=True, check=False, env=environment)
    found = [json.loads(line.partition(_FIGURES)[2]) for line in ended.stdout.splitlines() if _FIGURES in line]
    if ended.returncode or len(found) != ranks:
        raise SystemExit(ended.stderr)
    return found


def tell_figures(figures: dict[str, Any]) -> None:
    """Tell what a rank has measured, in one write: the ranks share the output."""
    os.write(1, f"{_FIGURES}{json.dumps(figures)}\n".encode())
