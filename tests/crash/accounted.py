"""A training that fails as it was told to, and writes down itself when: `accounted.py PLACE LOG TOTAL PLAN EVERY WHAT`.

Under torchrun. LOG gets a line of JSON for each start of a process, step, injection and end, by its own clock: what an
account of the run is compared with. PLAN: ``{"40": ["sigkill", 1], ...}``, what happens before which step on which
rank; each once, whatever life it is. WHAT: "gpt", the GPT of the examples under DDP, or "sleep".
"""

# ruff: noqa: E402 -- the time is taken before anything large is imported
from __future__ import annotations

import json
import os
import sys
import time

BEGAN_S = time.time()

import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import resilient
from tests.run.failing import RESTARTED

STEP_S = 0.03


class Samples(Dataset[torch.Tensor]):
    """Batches by worker processes: the one of a rank that fails is killed at a sample."""

    def __init__(self, plan: dict[int, tuple[str, int]], log: str, rank: int, from_step: int) -> None:
        self._kills = [at for at, (kind, bad) in plan.items() if kind == "worker" and bad == rank]
        self._log = log
        self._from_step = from_step

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        step = self._from_step + index
        if step in self._kills and once(self._log, step):
            say(self._log, "inject", step, kind="worker")
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4)


def say(log: str, what: str, step: int, **more: object) -> None:
    line = {"at": time.time(), "what": what, "step": step, "rank": int(os.environ["RANK"]), "pid": os.getpid(), **more}
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, json.dumps(line).encode() + b"\n")
    os.close(file)


def once(log: str, step: int) -> bool:
    """Say whether this is the first time that the program comes here, in all its lives."""
    try:
        os.close(os.open(f"{log}.{step}", os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    return True


def fail(kind: str, step: int) -> None:
    match kind:
        case "exception":
            raise ValueError(f"sample {step} has no label")
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(7)
        case "hang":
            time.sleep(10**6)
        case "sigstop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "stop":
            os.kill(os.getppid(), signal.SIGTERM)  # the agent, as a scheduler would
        case "all":
            os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)


def stepping(what: str) -> tuple[dict[str, Any], Callable[[], None]]:
    """Return what is to be tracked, and what makes a step of it."""
    if what == "sleep":
        state = {"x": torch.zeros(4)}

        def sleep() -> None:
            time.sleep(STEP_S)
            dist.all_reduce(torch.ones(4))
            state["x"] += 1

        return {"state": state}, sleep
    sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))
    from model import CONTEXT, GPT  # type: ignore[import-not-found]  # found through the line above

    torch.manual_seed(0)
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        tokens = torch.randint(256, (16, CONTEXT + 1))
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"model": model, "optimizer": optimizer}, step


def main(place: str, log: str, total: int, plan: dict[int, tuple[str, int]], every: int, what: str) -> None:
    rank = int(os.environ["RANK"])
    say(log, "began", 0, process_s=BEGAN_S)
    settings: dict[str, Any] = {"journal_every_s": 1.0}

    @resilient.train(place, every=every, **RESTARTED, **settings)
    def train(run: resilient.Run) -> None:
        tracked, make_step = stepping(what)
        run.track(**tracked)
        data: Iterable[object] = range(10**6)
        if any(kind == "worker" for kind, _ in plan.values()):
            data = DataLoader(Samples(plan, log, rank, run.step), num_workers=1, prefetch_factor=1)
        for _ in run.steps(data, total=total):
            say(log, "step", run.step)
            kind, bad = plan.get(run.step, ("", -1))
            if kind and kind != "worker" and bad == rank and once(log, run.step):
                say(log, "inject", run.step, kind=kind)
                fail(kind, run.step)
            make_step()

    try:
        train()
    finally:
        say(log, "over", 0)


if __name__ == "__main__":
    wanted = {int(step): (kind, int(rank)) for step, (kind, rank) in json.loads(sys.argv[4]).items()}
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), wanted, int(sys.argv[5]), sys.argv[6])
