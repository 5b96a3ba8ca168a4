"""A training under torchrun that keeps each step near; settings of the tiers come from the environment.

Usage: tiered_restart.py STORE FOLDER EVERY KILL

If KILL is 1, rank 1 of the first life kills itself, and removes the data in the store at that moment.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import resilient
from resilient.events import Bus

TOTAL = 60


def main() -> None:
    place, folder, every, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1"
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    real_emit = Bus.emit

    def emit(self: Bus, event: object) -> None:
        with (folder / f"events-{life}-{os.environ['RANK']}").open("a") as file:
            file.write(f"{event}\n")
        real_emit(self, event)  # type: ignore[arg-type]  # every event

    Bus.emit = emit  # type: ignore[method-assign]

    @resilient.train(place, every=every)
    def train(run: resilient.Run) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 256)
        fully_shard(model, mesh=init_device_mesh("cpu", (run.world_size,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run.track(model=model, optimizer=optimizer)
        node = os.environ.get("RESILIENT_NODE_LABEL", "")
        (folder / f"pid-{node}-{life}").write_text(str(os.getpid()))
        print(f"LIFE {life} rank {run.rank} of {run.world_size} from {run.step} at {time.time():.3f}", flush=True)
        for _ in run.steps(range(TOTAL), total=TOTAL):
            loss = model(torch.full((8, 64), run.step / TOTAL)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.15)
            # Its newest boundary is in the tiers, and the store is behind.
            if kills and life == 0 and run.rank == 1 and run.step >= 14 and run.step % 10 == 4 and _stored(place) >= 10:
                print(f"KILLED at {run.step} at {time.time():.3f}", flush=True)
                shutil.rmtree(Path(place) / "data")
                os.kill(os.getpid(), signal.SIGKILL)
        print(f"DONE rank {run.rank} at {run.step}", flush=True)

    train()
    os._exit(0)  # torch 2.13 with gloo and FSDP2 sometimes aborts at interpreter exit, with or without us


def _stored(place: str) -> int:
    commits = Path(place).glob("steps/*/*/COMMIT")
    return max((int(re.fullmatch(r"\d+", path.parts[-3])[0]) for path in commits), default=0)  # type: ignore[index]


if __name__ == "__main__":
    main()
