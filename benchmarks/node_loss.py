"""A node of three is killed, or comes late: what torchrun does with its own rendezvous, and with ours.

The same training with the same checkpoints on both: only ``--rdzv-backend`` differs. One JSON line a case: whether
training went on, and after how many seconds the first step on the nodes that were left (or joined by one) began.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.elastic.nodes import TOY, Line, Nodes  # noqa: E402 -- the nodes of the tests

PATIENCE_S = 120.0
CASES = ("the first node dies", "another node dies", "a node comes late")
BACKENDS = ("resilient", "c10d")


class Stock(Nodes):
    """The same nodes, with torchrun's own rendezvous, on the first of them."""

    def start(self, name: str, **_: object) -> subprocess.Popen[bytes]:  # type: ignore[override]
        if not self.nodes:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.port = free.getsockname()[1]
        command = [
            str(Path(sys.executable).with_name("torchrun")),
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self.port}",
            "--rdzv-id=job",
            f"--nnodes={self.nnodes}",
            "--nproc-per-node=1",
            "--max-restarts=3",
            "--local-addr=127.0.0.1",
            f"--rdzv-conf=last_call_timeout=10,join_timeout={PATIENCE_S:.0f},is_host={int(not self.nodes)}",
            str(TOY),
            self.place,
            str(self.log),
            str(self.steps),
        ]
        with (self.folder / f"out-{name}").open("wb") as out:
            self.nodes[name] = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        return self.nodes[name]


def measure(case: str, backend: str, folder: Path) -> dict[str, object]:
    """Return what became of one job."""
    nodes = (Nodes if backend == "resilient" else Stock)(folder, nnodes="1:3", steps=10**6, max_restarts=3)
    names = "ab" if case == CASES[2] else "abc"
    try:
        for name in names:
            nodes.start(name)
        nodes.await_line(lambda line: line.world_size == len(names) and line.step >= 25, timeout_s=PATIENCE_S)
        before = max(line.step for line in nodes.lines())
        if case == CASES[2]:
            at = time.time()
            nodes.start("c")
            size = 3
        else:
            at = nodes.kill(_with_rank(nodes, first=case == CASES[0]))
            size = 2
        return _outcome(nodes, at, before, lambda line: line.at > at and line.world_size == size)
    finally:
        nodes.close()


def _with_rank(nodes: Nodes, *, first: bool) -> str:
    names = {node.pid: name for name, node in nodes.nodes.items()}
    ranks = {names[line.agent]: line.rank for line in nodes.lines() if line.agent in names}
    if isinstance(nodes, Stock):
        return "a" if first else "b"  # the host of the rendezvous is the one that cannot be spared
    return next(name for name, rank in ranks.items() if (rank == 0) == first)


def _outcome(nodes: Nodes, at: float, before: int, wanted: Callable[[Line], bool]) -> dict[str, object]:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        found = [line for line in nodes.lines() if wanted(line)]
        if found:
            return {
                "goes_on": True,
                "first_step_s": round(found[0].at - at, 2),
                "steps_lost": before + 1 - found[0].step,
            }
        alive = [name for name, node in nodes.nodes.items() if node.poll() is None]
        if not alive:
            return {"goes_on": False, "ended_after_s": round(time.time() - at, 2)}
        time.sleep(0.1)
    alive = [name for name, node in nodes.nodes.items() if node.poll() is None]
    return {"goes_on": False, "gave_up_after_s": PATIENCE_S, "agents_alive": len(alive)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--backends", nargs="*", default=BACKENDS, choices=BACKENDS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="node-loss-") as folder:
        for number in range(options.rounds):
            for case in options.cases:
                for backend in options.backends:
                    place = Path(folder) / f"{number}-{options.cases.index(case)}-{backend}"
                    figure = {"case": case, "backend": backend, "round": number}
                    print(json.dumps({**figure, **measure(case, backend, place)}), flush=True)


if __name__ == "__main__":
    main()
