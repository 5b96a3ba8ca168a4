"""A training that is asked to stop, as one rank of it: what it did is written down for whoever asked.

Usage: stopping.py STORE FOLDER LIFE TOTAL PAUSE_S [WHERE]. WHERE: "eval" evaluates after each pass, "workers" loads
with four processes a rank, "saving" has a save in flight at nearly every step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import resilient

LENGTH, GLOBAL_BATCH = 60, 6  # ten steps a pass


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(7, generator=generator).double()


def evaluate(model: torch.nn.Module, data: Dataset[torch.Tensor]) -> float:
    with torch.no_grad():
        losses = [model(batch).square().mean() for batch in DataLoader(data, batch_size=5)]
        total = torch.stack(losses).mean()
    dist.all_reduce(total)
    time.sleep(0.2)
    return total.item()


def train_until_stopped(store: str, folder: str, life: str, total: int, pause_s: float, where: str = "") -> None:
    place, rank = Path(folder), os.environ["RANK"]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and we respect that

    @resilient.train(store, every=4 if where == "saving" else 10**6, keep=resilient.Keep(last=3))
    def main(run: resilient.Run) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 5)).double()
        ballast = {"frozen": torch.zeros(500_000)}  # so that a save takes a while
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sampler = resilient.ElasticSampler(LENGTH, global_batch=GLOBAL_BATCH, seed=3)
        run.track(model=model, optimizer=optimizer, data=sampler, ballast=ballast)
        data = Numbers()
        workers = 4 if where == "workers" else 0
        loader = DataLoader(
            data,
            batch_sampler=sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
            multiprocessing_context="fork" if workers else None,  # as where nothing is said; not what started us
        )
        (place / f"pid-{life}-{rank}").write_text(f"{os.getpid()} {run.step}")
        while run.step < total:
            for batch in run.steps(loader):
                loss = model(batch).square().mean() * run.loss_weight
                optimizer.zero_grad()
                loss.backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
                    assert parameter.grad is not None
                    parameter.grad.div_(run.world_size)
                optimizer.step()
                (place / f"step-{life}-{rank}").write_text(str(run.step + 1))
                time.sleep(pause_s)
            if where == "eval":
                with run.section("eval"):
                    (place / f"eval-{life}-{rank}").write_text(str(run.step))
                    evaluate(model, data)
                    (place / f"eval-{life}-{rank}").unlink()
        arrays = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            arrays |= {f"{name}.{key}": value.numpy() for key, value in optimizer.state[parameter].items()}
        if run.rank == 0:
            np.savez(place / f"final-{life}.npz", allow_pickle=False, **arrays)

    main()


def train_with_slow_saves(store: str, folder: str, life: str, grace_s: float, total: int) -> None:
    """Fill a tensor with the number of steps; its saves take longer than the grace time, but for the first one."""
    place, rank = Path(folder), os.environ["RANK"]

    @resilient.train(store, every=10, keep=resilient.Keep(last=3), max_bandwidth="0.25MB/s", grace_s=grace_s)
    def main(run: resilient.Run) -> None:
        state = {"filled": torch.rand(300_000, generator=torch.Generator().manual_seed(0)), "step": torch.zeros(1)}
        drawn = state["filled"].clone()
        run.track(state=state)
        assert state["step"].item() == run.step
        assert torch.equal(state["filled"], drawn + run.step), "what was restored is not the state of its step"
        (place / f"pid-{life}-{rank}").write_text(f"{os.getpid()} {run.step}")
        for _ in run.steps(range(10**6), total=total):
            dist.all_reduce(torch.ones(1))
            run.fence()
            state["step"] += 1
            state["filled"].copy_(drawn + state["step"])
            (place / f"step-{life}-{rank}").write_text(str(run.step + 1))
            time.sleep(0.01)

    main()


if __name__ == "__main__":
    store, folder, life, total, pause_s, *where = sys.argv[1:]
    train_until_stopped(store, folder, life, int(total), float(pause_s), *where)
