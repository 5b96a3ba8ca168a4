"""A training that keeps its newest states in node tiers, for lives that are killed; ranks play the nodes of a job."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import resilient
from resilient.events import Bus
from resilient.format.digest import digest

LENGTH, GLOBAL_BATCH = 67, 12


def train(
    place: str, folder: str, life: str, settings: dict[str, Any], total: int, pause_s: float, nodes: str = "0123"
) -> None:
    """Train a model that is sharded over all ranks; ``nodes`` says, for each rank, which node it is on."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["RESILIENT_NODE_DIR"] = str(Path(folder) / f"node-{nodes[rank]}")
    os.environ["RESILIENT_NODE_LABEL"] = f"rack-{nodes[rank]}"
    notes = Path(folder) / f"events-{life}-{rank}"
    real_emit = Bus.emit

    def emit(self: Bus, event: object) -> None:
        with notes.open("a") as file:
            file.write(f"{event}\n")
        real_emit(self, event)  # type: ignore[arg-type]  # every event, whatever kind

    Bus.emit = emit  # type: ignore[method-assign]

    @resilient.train(place, **settings)
    def main(run: resilient.Run) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(7, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5)).double()
        if size > 1:
            mesh = init_device_mesh("cpu", (size,))
            for layer in (model[0], model[2], model):
                fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sampler = resilient.ElasticSampler(LENGTH, global_batch=GLOBAL_BATCH, seed=3)
        run.track(model=model, optimizer=optimizer, data=sampler)
        data = torch.randn(LENGTH, 7, generator=torch.Generator().manual_seed(5)).double()
        with (Path(folder) / f"steps-{life}-{rank}").open("a", buffering=1) as seen:
            seen.write(f"from {run.step}\n")
            for batch in run.steps(sampler, total=total):
                loss = model(data[batch]).square().mean() * run.loss_weight
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.write(f"{run.step}\n")
                time.sleep(pause_s)
        weights = {name: full(parameter) for name, parameter in model.named_parameters()}
        if rank == 0:
            np.savez(Path(folder) / f"final-{life}.npz", allow_pickle=False, **weights)
        if size > 1:
            dist.barrier()

    main()


def full(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy()


def started_from(folder: Path, life: str, rank: int = 0) -> int:
    """Return the step that a life continued."""
    return int((folder / f"steps-{life}-{rank}").read_text().split("\n")[0].removeprefix("from "))


def last_step(folder: Path, life: str, rank: int = 0) -> int:
    """Return the last step that a life has begun; -1 before the first."""
    path = folder / f"steps-{life}-{rank}"
    lines = path.read_text().split("\n")[1:-1] if path.exists() else []
    return int(lines[-1]) if lines else -1


def events(folder: Path, life: str, kind: str, rank: int = 0) -> list[str]:
    """Return what happened in a life, of one kind."""
    path = folder / f"events-{life}-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.startswith(f"{kind}(")]


def tier_of(folder: Path, rank: int) -> Path:
    """Return where the tier of a node lies, if it is on a disk at ``folder/tier``; for tests that lose the node."""
    node = digest(str(folder / f"node-{rank}").encode()).hex()[:16]
    (found,) = (folder / "tier").glob(f"resilient-*/*/{node}")
    return found


def lose_data(place: Path) -> None:
    """Remove the data of a run, and leave all that is said about it."""
    shutil.rmtree(place / "data", ignore_errors=True)


@contextmanager
def no_memory_left_behind(folder: Path) -> Iterator[None]:
    """Remove what the runs of a test, somewhere below ``folder``, leave in the memory of this machine."""
    try:
        yield
    finally:
        for place in [path.parent for path in folder.rglob("run.json")]:
            shutil.rmtree(Path("/dev/shm") / f"resilient-{os.getuid()}" / folder_of(place), ignore_errors=True)


def folder_of(place: Path) -> str:
    """Return how the directory of a run in a tier is called."""
    run_id: str = json.loads((place / "run.json").read_text())["run_id"]
    return digest(run_id.encode()).hex()[:16]


def newest_in_tiers(place: Path, base: Path, size: int) -> int:
    """Return the newest step of a run of which all ranks have receipts in tiers below ``base``; -1 if there is none."""
    ranks: dict[int, set[int]] = {}
    for path in base.glob(f"resilient-*/{folder_of(place)}/*/steps/*/*/receipts/*"):
        if path.name.isdecimal():
            ranks.setdefault(int(path.parts[-4]), set()).add(int(path.name))
    return max((step for step, having in ranks.items() if having == set(range(size))), default=-1)
