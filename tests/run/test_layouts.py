"""What a boundary is under FSDP2 and DDP, where gradients are kept in places of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from resilient.run.boundary import BoundaryWatch


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def pending_under_fsdp2() -> list[bool]:
    model = _model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    watch = BoundaryWatch({"model": model, "optimizer": optimizer})
    found = [watch.pending()]
    for last in (False, True, False, True):
        model.set_requires_gradient_sync(last)  # type: ignore[operator]  # fully_shard has made it an FSDPModule
        model(torch.ones(2, 4)).sum().backward()
        found.append(watch.pending())
        if last:
            optimizer.step()
            found.append(watch.pending())
            # Once left as they are, so that the next gradients are added to them; once taken away.
            if len(found) > 4:
                optimizer.zero_grad()
    found.append(watch.pending())
    return found


def pending_under_ddp() -> list[bool]:
    model = DistributedDataParallel(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = BoundaryWatch({"model": model, "optimizer": optimizer})
    found = [watch.pending()]
    for _ in range(2):
        with model.no_sync():
            model(torch.ones(2, 4)).sum().backward()
        found.append(watch.pending())
        model(torch.ones(2, 4)).sum().backward()
        found.append(watch.pending())
        optimizer.step()
        found.append(watch.pending())
    optimizer.zero_grad()
    found.append(watch.pending())
    return found


def test_gradients_that_fsdp2_has_not_reduced_yet_are_pending(ranks: Any) -> None:
    assert ranks(2).run(pending_under_fsdp2) == [[False, True, True, False, True, True, False, False]] * 2


def test_gradients_that_ddp_has_not_exchanged_yet_are_pending(ranks: Any) -> None:
    assert ranks(2).run(pending_under_ddp) == [[False, True, True, False, True, True, False, False]] * 2
