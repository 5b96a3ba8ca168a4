"""One process: `python single.py`. Stop it as you like, start it again: it continues."""

from __future__ import annotations

import torch
from model import GPT, Text, device, options
from torch.utils.data import DataLoader

import resilient

args = options()


@resilient.train(args.store, every=args.every)
def main(run: resilient.Run) -> None:
    torch.manual_seed(0)
    data = Text()
    model = GPT().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    sampler = resilient.ElasticSampler(len(data), global_batch=16, seed=0)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, data=sampler)

    for inputs, targets in run.steps(DataLoader(data, batch_sampler=sampler), total=args.steps):
        loss = model(inputs.to(device()), targets.to(device()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if run.step % 5 == 4:
            print(f"step {run.step + 1}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
