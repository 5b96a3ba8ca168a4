"""A training in which one rank fails: `python failing.py PLACE KIND SPEED RANK`, under torchrun, with gloo."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import resilient

AT_STEP = 4
SLOW_S = 2.0
RESTARTED: dict[str, Any] = {"on_hang": "restart", "watch_every_s": 0.25, "hang_floor_s": 2, "hang_after_s": 12}


class Samples(Dataset[torch.Tensor]):
    def __init__(self, *, killed_at: int | None) -> None:
        self._killed_at = killed_at

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self._killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4)


def fail(kind: str) -> None:
    match kind:
        case "exception":
            raise ValueError(f"sample {AT_STEP} has no label")
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sigsegv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(7)
        case "oom":
            taken = []
            while True:
                taken.append(torch.ones(1 << 26))  # touched, until the kernel ends this process
        case "hang":
            time.sleep(10**6)
        case "sigstop":
            os.kill(os.getpid(), signal.SIGSTOP)


def main(place: str, kind: str, speed: str, bad: int) -> None:
    @resilient.train(place, every=10**6, **(RESTARTED if kind in ("hang", "sigstop") else {}))
    def train(run: resilient.Run) -> None:
        state = {"x": torch.zeros(4)}
        run.track(state=state)
        fails = run.rank == bad
        data: Iterable[object] = range(10**6)
        if kind == "worker":
            data = DataLoader(Samples(killed_at=4 * AT_STEP if fails else None), batch_size=4, num_workers=1)
        for _ in run.steps(data, total=10**6):
            if run.step == AT_STEP and fails:
                fail(kind)
            elif run.step == AT_STEP and speed == "slow":
                time.sleep(SLOW_S)
            if run.step == AT_STEP and fails and kind == "desync":
                dist.all_reduce(torch.ones(100_000))
            else:
                dist.all_reduce(torch.ones(4))
            state["x"] += 1

    train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
