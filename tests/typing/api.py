"""How the public names are used, as type checkers see it. Never run, only checked."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, assert_type

import torch
from torch.utils.data import DataLoader, TensorDataset

import resilient

KEEP = resilient.Keep(last=3, every=1000) | resilient.Keep(every_time="6h", best=2, metric="accuracy", mode="max")


@resilient.train("s3://bucket/run", every="2min", keep=KEEP, resume="required")
def main(run: resilient.Run, learning_rate: float) -> int:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    sampler = resilient.ElasticSampler(10, global_batch=2, seed=0)
    assert_type(
        run.track(
            model=model,
            optimizer=optimizer,
            data=sampler,
            own=resilient.PerRank({"rank": run.rank}),
            ema=resilient.AfterStep({"w": torch.zeros(1)}),
        ),
        resilient.Restored | None,
    )
    data: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(TensorDataset(torch.zeros(10, 2)), batch_sampler=sampler)
    for _ in run.steps(data, total=100):
        pass
    for number in run.steps([1, 2], total=110):
        assert_type(number, int)
        run.metrics(loss=0.5, accuracy=torch.tensor(0.9))
        with run.section("eval"):
            assert_type(run.loss_weight, float)
            assert_type(run.accumulation, int)
    assert_type(run.save(reason="end"), resilient.SaveHandle)
    run.fence()
    return run.step


assert_type(main(0.1), int)
resilient.train(Path("run"), every=resilient.SaveWhen(steps=100) | resilient.SaveWhen(seconds=60.0))
resilient.train("run", every=100)


def by_hand(store: resilient.Store, items: Mapping[str, object]) -> None:
    handle = resilient.save(store, 3, items)
    assert_type(handle.staged, Future[None])
    assert_type(handle.persisted, Future[None])
    assert_type(handle.committed, Future[int])
    handle.wait(60)
    part = resilient.Shard(torch.zeros(2, 2), "experts", (4, 2), (2, 0))
    found = resilient.load("memory://place", {"model": {"part": part}}, step=3)
    assert_type(found, resilient.Checkpoint)
    for each in resilient.checkpoints(store):
        assert_type(each, resilient.Checkpoint)
        assert_type(each.step, int)
        assert_type(each.items, tuple[str, ...])
        assert_type(each.tensor("model.weight"), torch.Tensor)
        each.load(into=items)


def told(error: resilient.ResilientError) -> tuple[str, str | None, int | None, int]:
    return error.kind, error.hint, error.rank, error.exit_code


def version() -> str:
    return resilient.__version__


def anything() -> list[Any]:
    return [resilient.Keep(), resilient.SaveWhen(auto=True)]
