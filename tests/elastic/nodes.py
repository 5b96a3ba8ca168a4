"""Nodes of a job on this machine: each a torchrun of its own, with its workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TOY = Path(__file__).with_name("toy_training.py")


@dataclass(frozen=True, slots=True)
class Line:
    """What a worker has said: ``agent`` is the process that started it."""

    at: float
    rank: int
    world_size: int
    agent: int
    what: str
    step: int


class Nodes:
    """A job: its place, what its workers say, and its nodes."""

    def __init__(self, folder: Path, *, nnodes: str, steps: int, conf: str = "", max_restarts: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.place = str(folder / "place")
        self.log = folder / "log"
        self.nnodes = nnodes
        self.steps = steps
        self.conf = conf
        self.max_restarts = max_restarts
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self,
        name: str,
        *,
        endpoint: str | None = None,
        script: Path = TOY,
        conf: str = "",
        environ: dict[str, str] | None = None,
        arguments: Sequence[str] | None = None,
        through: Callable[[Sequence[str]], list[str]] = list,
    ) -> subprocess.Popen[bytes]:
        """Start a node; ``through`` puts what is to run into what runs it, elsewhere on this machine."""
        settings = ",".join(each for each in ("last_call_timeout=2", self.conf, conf) if each)
        command = [
            str(Path(sys.executable).with_name("torchrun")),
            "--rdzv-backend=resilient",
            f"--rdzv-endpoint={self.place if endpoint is None else endpoint}",
            "--rdzv-id=job",
            f"--nnodes={self.nnodes}",
            "--nproc-per-node=1",
            f"--max-restarts={self.max_restarts}",
            f"--rdzv-conf={settings}",
            str(script),
            *(arguments if arguments is not None else [self.place, str(self.log), str(self.steps)]),
        ]
        with (self.folder / f"out-{name}").open("wb") as out:
            self.nodes[name] = subprocess.Popen(
                through(command),
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
                start_new_session=True,
            )
        return self.nodes[name]

    def kill(self, name: str) -> float:
        """Kill a node, its agent and its workers, at once; return when."""
        self._signal(name, signal.SIGKILL)
        at = time.time()
        self.nodes[name].wait(timeout=30)
        return at

    def freeze(self, name: str) -> float:
        """Stop a node, its agent and its workers, so that it falls silent, as a host that is gone; return when."""
        self._signal(name, signal.SIGSTOP)
        return time.time()

    def thaw(self, name: str) -> None:
        """Let a node go on that was stopped."""
        self._signal(name, signal.SIGCONT)

    def _signal(self, name: str, number: signal.Signals) -> None:
        agent = self.nodes[name].pid
        for pid in [agent, *descendants(agent)]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        for name, node in self.nodes.items():
            if node.poll() is None:
                self.kill(name)

    def output(self, name: str | None = None) -> str:
        names = list(self.nodes) if name is None else [name]
        return "\n".join(f"--- {each}\n{(self.folder / f'out-{each}').read_text(errors='replace')}" for each in names)

    def lines(self, what: str = "step") -> list[Line]:
        if not self.log.exists():
            return []
        found = []
        for text in self.log.read_text().splitlines():
            at, rank, world_size, agent, said, *rest = text.split()
            if said == what:
                found.append(Line(float(at), int(rank), int(world_size), int(agent), said, int(rest[0]) if rest else 0))
        return found

    def await_line(self, wanted: Callable[[Line], bool], *, what: str = "step", timeout_s: float = 120) -> Line:
        """Return the first such line."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            for line in self.lines(what):
                if wanted(line):
                    return line
            time.sleep(0.05)
        raise AssertionError(f"no such line within {timeout_s} s\n{self.output()}\n{self.lines()[-5:]}")

    def await_text(self, name: str, text: str, *, timeout_s: float = 120) -> None:
        end = time.monotonic() + timeout_s
        while text not in self.output(name):
            assert time.monotonic() < end, f"{text!r} is not said\n{self.output()}"
            time.sleep(0.05)

    def await_exit(self, *names: str, timeout_s: float = 120) -> list[int]:
        end = time.monotonic() + timeout_s
        try:
            return [self.nodes[name].wait(max(0.1, end - time.monotonic())) for name in names]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running\n{self.output()}\n{self.lines()[-5:]}") from None


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found
