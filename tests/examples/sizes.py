"""The GPT of the examples in float64, which writes down what each step has used, and its loss.

``sizes.py PLACE RECORDS STEPS``, on any number of ranks. Dropout is off: its masks belong to ranks, so that two world
sizes never have the same ones (docs/elastic.md).
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import resilient

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
from model import GPT, Text  # type: ignore[import-not-found]  # it lies beside the examples

GLOBAL_BATCH, MICRO_BATCH = 16, 3
PLACE, RECORDS, STEPS = sys.argv[1], sys.argv[2], int(sys.argv[3])


class Numbered(Dataset[tuple[int, Tensor, Tensor]]):
    def __init__(self) -> None:
        self.text = Text(200_000)

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, *self.text[index]


@resilient.train(PLACE, every=2)
def main(run: resilient.Run) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    data = Numbered()
    model = GPT()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    net = DistributedDataParallel(model) if run.world_size > 1 else model
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    sampler = resilient.ElasticSampler(len(data), global_batch=GLOBAL_BATCH, seed=0, micro_batch=MICRO_BATCH)
    run.track(model=net, optimizer=optimizer, scheduler=scheduler, data=sampler)

    with Path(f"{RECORDS}-{os.getpid()}").open("a") as records:
        for micro_batches in run.steps(DataLoader(data, batch_sampler=sampler), total=STEPS):
            total = 0.0
            used: list[int] = []
            for number, (indices, inputs, targets) in enumerate(micro_batches, 1):
                last = number == run.accumulation
                with nullcontext() if last or net is model else net.no_sync():
                    loss = net(inputs, targets) * run.loss_weight
                    loss.backward()
                total += loss.item() / run.world_size
                used += indices.tolist() if run.loss_weight else []
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            record = {"step": run.step + 1, "rank": run.rank, "ranks": run.world_size}
            print(json.dumps({**record, "loss": total, "used": used}), file=records, flush=True)


main()
