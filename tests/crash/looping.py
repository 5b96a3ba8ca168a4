"""A training that fails after restarts, started by torchrun.

Usage: looping.py STORE TOTAL CASE. What it starts from is printed. CASE:
    clean: it trains.
    poison: as clean, but the last state has a NaN in what is used three steps after a restore only.
    same-step: it fails at step 13, whatever it starts from.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import resilient

BAD_STEP = 13


def main() -> None:
    place, total, case = sys.argv[1], int(sys.argv[2]), sys.argv[3]

    @resilient.train(place, every=1000, keep=resilient.Keep(last=100))
    def train(run: resilient.Run) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        late = {"scale": torch.ones(2)}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sampler = resilient.ElasticSampler(64, global_batch=4, seed=0)
        run.track(model=model, optimizer=optimizer, late=late, data=sampler)
        start = run.step
        print(f"START rank {run.rank} from {start}", flush=True)
        data = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        for batch in run.steps(sampler, total=total):
            if run.step % 5 == 0 and run.step > start:
                run.save().wait(60)
            out = model(data[batch])
            if run.step - start >= 3:
                out = out * late["scale"]
            loss = out.square().mean()
            if not torch.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss.item()} at step {run.step}")
            if case == "same-step" and run.step == BAD_STEP and run.rank == 1:
                raise ValueError(f"record {os.getpid()} cannot be decoded")
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            if case == "poison" and run.step == total - 1:
                late["scale"][0] = float("nan")

    train()


if __name__ == "__main__":
    main()
