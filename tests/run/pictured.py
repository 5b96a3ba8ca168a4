"""Trainings of two ranks whose exchange takes a share of their steps that is known: a program for test_picture.

The program's own clock measures the collective of each step. What stands for computing is a pause, made as long as it
has to be for the share that is wanted; so it is that share on a busy machine too.
"""

import faulthandler
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient
from resilient import events
from resilient.run import picture_sampling

STEPS = 26
WIDTH = 280  # two layers of about 300 kB: 0.6 MB to exchange, in one bucket


class Exchange:
    """Averages gradients, by hand or as DDP's hook; knows how long the last collective took."""

    def __init__(self) -> None:
        self.took_s = 0.0

    def by_hand(self, model: nn.Module) -> None:
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        parts = torch.split(flat, [grad.numel() for grad in grads])
        began_s = time.monotonic()
        dist.all_reduce(flat)
        self.took_s = time.monotonic() - began_s
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad) / dist.get_world_size())

    def hook(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Do what DDP does without a hook."""
        began_s = time.monotonic()
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)

        def done(future: Any) -> torch.Tensor:
            self.took_s = time.monotonic() - began_s
            mean: torch.Tensor = future.value()[0] / dist.get_world_size()
            return mean

        return work.get_future().then(done)  # type: ignore[no-any-return]  # torch has no types for it


def train(place: str, how: str, share: float) -> dict[str, object]:
    """Train so that the exchange takes ``share`` of a step; return its true share, and what was told."""
    torch.manual_seed(0)
    exchange = Exchange()
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    if how == "DDP":
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, exchange.hook)
    inputs = torch.randn(4, WIDTH)
    told: list[events.Event] = []
    rest_s = 0.0  # what a step takes besides the exchange and the pause
    plain: list[float] = []
    exchanged: dict[bool, list[float]] = {True: [], False: []}  # by whether the step was looked at

    @resilient.train(
        place,
        every=10_000,
        picture_every=2,
        compare_every_s=600.0,  # one picture, at the end
        observers=(told.append,),
    )
    def main(run: resilient.Run) -> None:
        nonlocal rest_s
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        run.track(model=model, optimizer=optimizer)
        before_s = time.monotonic()
        for number in run.steps(range(STEPS)):
            usual_s = statistics.median([*exchanged[True], *exchanged[False]][-5:] or [0.05])
            pause_s = min(0.4, max(0.0, usual_s * (1 - share) / share - rest_s))  # a busy machine: then it is not calm
            looked = torch.autograd._profiler_enabled()
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            time.sleep(pause_s)
            loss.backward()
            if how == "by hand":
                exchange.by_hand(model)
            optimizer.step()
            now_s = time.monotonic()
            exchanged[looked].append(exchange.took_s)
            if number >= 5 and not looked:
                plain.append(now_s - before_s)
                rest_s = max(0.0, now_s - before_s - pause_s - exchange.took_s)
            before_s = now_s

    main()
    pictures = [event for event in told if isinstance(event, events.StepPicture)]
    true_s = statistics.median(exchanged[True][1:])  # the first look is thrown away
    return {
        "how": how,
        "wanted": share,
        "true": true_s / statistics.median(plain),
        "shown": [picture.exchange_s / picture.step_s for picture in pictures],
        "steps": [picture.steps for picture in pictures],
        "step_s": statistics.median(plain),
        "sentences": [event.sentence for event in told if isinstance(event, events.Bottleneck)],
    }


def main() -> None:
    place, cases, tries = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    faulthandler.enable()
    torch.set_num_threads(1)
    # What is shown is the question here, by looking at half of few steps, and not what looking costs.
    picture_sampling.BUDGET = 1.0  # type: ignore[misc]
    dist.init_process_group("gloo")
    for how, share in cases:
        for attempt in range(tries):
            found = train(str(place / f"{how}-{share}-{attempt}"), how, share)
            calm = torch.tensor(float(abs(float(str(found["true"])) - share) <= 0.05))
            dist.all_reduce(calm, op=dist.ReduceOp.MIN)
            if calm or attempt + 1 == tries:
                print("SHOWN " + json.dumps({"rank": dist.get_rank(), "calm": bool(calm), **found}), flush=True)
                break
    dist.barrier()
    os._exit(0)  # not the interpreter's own end: gloo's threads sometimes abort in it (torch 2.13)


if __name__ == "__main__":
    main()
