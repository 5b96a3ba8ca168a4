"""One life of a training job: processes started as torchrun starts its workers, to be killed for real.

They are forked from a server that has imported torch already, so a life starts in a fraction of a second; what torchrun
itself adds is tested where torchrun is used.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.ranks import fork_context

TIMEOUT_S = 120.0


class Life:
    """``size`` processes that run ``program(*args)``, a module-level function, with the environment of torchrun.

    Their output goes to ``folder/rank-N.log``.
    """

    def __init__(self, size: int, folder: Path, program: Callable[..., None], *args: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        name = f"{program.__module__}:{program.__qualname__}"
        port = _free_port()
        self._processes: list[Any] = []
        for rank in range(size):
            env = {
                **os.environ,  # as it is now: the fork server has kept that of its own start
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            process = fork_context().Process(target=_live, args=(env, str(folder / f"rank-{rank}.log"), name, args))
            process.start()
            self._processes.append(process)

    @property
    def alive(self) -> bool:
        return any(process.is_alive() for process in self._processes)

    def kill(self, rank: int | None = None) -> None:
        """SIGKILL one rank, or all of them at once."""
        for process in self._processes if rank is None else [self._processes[rank]]:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)

    def kill_with_writers(self) -> None:
        """SIGKILL all ranks and their writer processes, as a machine that loses its power does."""
        trainers = [process.pid for process in self._processes]
        for pid in [*trainers, *(writer for trainer in trainers for writer in writers_of(trainer))]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self, timeout_s: float = TIMEOUT_S) -> list[int]:
        """Return the exit codes; whoever has not ended in time writes its stacks, is killed, and fails the test."""
        end = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        late = [rank for rank, process in enumerate(self._processes) if process.is_alive()]
        signals = "\n".join(f"rank {rank}: {signals_of(self._processes[rank].pid)}" for rank in late)
        for rank in late:
            os.kill(self._processes[rank].pid, signal.SIGABRT)
        for process in self._processes:
            process.join(10)
        self.kill()
        if late:
            raise AssertionError(f"ranks {late} had not ended after {timeout_s:g} s\n{signals}\n{self.output()}")
        return [process.exitcode for process in self._processes]

    def succeed(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait; fail the test, with what the ranks printed, unless all of them ended well."""
        codes = self.wait(timeout_s)
        assert not any(codes), f"exit codes {codes}\n{self.output()}"

    def output(self, tail: int = 4000) -> str:
        """Return the last characters that each rank printed."""
        logs = sorted(self._folder.glob("rank-*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-tail:]}" for log in logs)


def signals_of(pid: int) -> str:
    """Return which signals wait for a process, and which it blocks, ignores and handles: one may have been lost."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return ", ".join(" ".join(line.split()) for line in lines if line.startswith(("Sig", "ShdPnd")))


def writers_of(trainer: int) -> list[int]:
    """Return the process ids of the writers that a process has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it has just ended
            if b"resilient.writer" in words and words[words.index(b"process") + 1] == str(trainer).encode():
                found.append(int(entry.name))
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _live(env: dict[str, str], log: str, name: str, args: tuple[object, ...]) -> None:
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=sink, all_threads=True)
    os.environ |= env
    code = 0
    try:
        module, _, function = name.partition(":")
        getattr(importlib.import_module(module), function)(*args)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 -- process main: printed, and the exit code says it
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not the interpreter's own end: gloo's threads sometimes abort in it (torch 2.13 with FSDP2).
    os._exit(code)
