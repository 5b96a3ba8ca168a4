"""A training of one number on as many nodes as there are: `python toy_training.py PLACE LOG STEPS`, under torchrun.

With TOY_IS_DEAF in the environment it is one that does not know this library, and only counts; with TOY_LINGERS_S it
takes so long to end; with TOY_IS_SICK a step of it fails as by a broken device.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import resilient

STEP_S = 0.05
SICK_AT = 15


def main(place: str, log: str, steps: int) -> None:
    def say(*what: object) -> None:
        with Path(log).open("a") as file:
            print(f"{time.time():.3f}", os.environ["RANK"], os.environ["WORLD_SIZE"], os.getppid(), *what, file=file)

    @resilient.train(place, every=10)
    def train(run: resilient.Run) -> None:
        state = {"x": torch.zeros(4)}
        run.track(state=state)
        say("resumed", run.step)
        for _ in run.steps(range(10**6), total=steps):
            run.fence()
            if os.environ.get("TOY_IS_SICK") and run.step == SICK_AT:
                raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
            state["x"] += _count() / dist.get_world_size()
            say("step", run.step + 1)
            time.sleep(STEP_S)
        assert (state["x"] == steps).all(), state

    def count_only() -> None:
        dist.init_process_group("gloo")
        for step in range(1, steps + 1):
            _count()
            say("step", step)
            time.sleep(STEP_S)
        dist.destroy_process_group()

    say("start")
    count_only() if os.environ.get("TOY_IS_DEAF") else train()
    say("end")
    time.sleep(float(os.environ.get("TOY_LINGERS_S", "0")))


def _count() -> float:
    one = torch.ones(1)
    if dist.get_world_size() > 1:
        dist.all_reduce(one)
    return float(one)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
