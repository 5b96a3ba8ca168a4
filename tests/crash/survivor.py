"""The training of the survival proof, started by torchrun: FSDP2 in float64, every sample recorded.

Usage: survivor.py STORE FOLDER LIFE TOTAL PAUSE_S
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import resilient

LENGTH, GLOBAL_BATCH = 67, 12


def full(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy()


def main() -> None:
    store, folder, life, total, pause_s = (
        sys.argv[1],
        Path(sys.argv[2]),
        sys.argv[3],
        int(sys.argv[4]),
        float(sys.argv[5]),
    )

    @resilient.train(store, every=5, keep=resilient.Keep(last=3))
    def train(run: resilient.Run) -> None:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 5)).double()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
        sampler = resilient.ElasticSampler(LENGTH, global_batch=GLOBAL_BATCH, seed=3)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler, data=sampler)
        data = torch.randn(LENGTH, 7, generator=torch.Generator().manual_seed(5)).double()
        (folder / f"pid-{life}-{run.rank}").write_text(str(os.getpid()))
        with (folder / f"samples-{life}-{run.rank}").open("a", buffering=1) as seen:
            for batch in run.steps(sampler, total=total):
                loss = model(data[batch]).square().mean() * run.loss_weight
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                seen.write(f"{run.step} {' '.join(map(str, batch))}\n")
                time.sleep(pause_s)
        arrays = {}
        for name, parameter in model.named_parameters():
            arrays[name] = full(parameter)
            for key, value in optimizer.state[parameter].items():
                arrays[f"{name}.{key}"] = full(value)
        if run.rank == 0:
            np.savez(folder / f"final-{life}.npz", allow_pickle=False, **arrays)
        dist.barrier()

    train()
    os._exit(0)  # torch 2.13 with gloo and FSDP2 sometimes aborts at interpreter exit, with or without us


if __name__ == "__main__":
    main()
