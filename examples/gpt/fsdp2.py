"""Sharded with FSDP2: `torchrun --nproc-per-node=3 fsdp2.py`. Start it again on any number of ranks: it continues."""

from __future__ import annotations

import torch
from model import GPT, Text, device, options
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import resilient

args = options()


@resilient.train(args.store, every=args.every)  # starts the process group, too
def main(run: resilient.Run) -> None:
    torch.manual_seed(0)
    data = Text()
    model = GPT().to(device())
    mesh = init_device_mesh(device().type, (run.world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    sampler = resilient.ElasticSampler(len(data), global_batch=16, seed=0)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, data=sampler)

    for inputs, targets in run.steps(DataLoader(data, batch_sampler=sampler), total=args.steps):
        loss = model(inputs.to(device()), targets.to(device()))
        (loss * run.loss_weight).backward()  # the weight is 1 unless the ranks' parts of the batch differ in size
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if run.step % 5 == 4 and run.rank == 0:
            print(f"step {run.step + 1}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
