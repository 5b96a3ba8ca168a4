"""Objects that keep their own state: schedulers, scalers, samplers, and what a user writes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler

from resilient.errors import ErrorKind, UsageError
from resilient.state.capture import capture
from resilient.state.wrappers import Shard
from tests.state.tiny_engine import load, same, save

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=100),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1, 60), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20), lr_scheduler.CosineAnnealingLR(optimizer, T_max=80)],
        milestones=[20],
    ),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.95**epoch),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=101),
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 10, 2),
    "multi step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [10, 50, 50]),
}


@pytest.mark.filterwarnings("ignore:.*epoch parameter.*:UserWarning")
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.field_report("BR-085")
def test_the_learning_rates_are_those_of_the_uninterrupted_run(kind: str) -> None:
    def make() -> tuple[nn.Module, Optimizer, Any]:
        model = nn.Linear(1, 1)
        optimizer = SGD(model.parameters(), lr=0.5)
        return model, optimizer, SCHEDULERS[kind](optimizer)

    def rates(optimizer: Optimizer, scheduler: Any, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    model, optimizer, scheduler = make()
    rates(optimizer, scheduler, 45)
    saved = save({"model": model, "optimizer": optimizer, "scheduler": scheduler})
    other, again, rebuilt = make()
    load(saved, {"model": other, "optimizer": again, "scheduler": rebuilt})
    assert rates(again, rebuilt, 55) == rates(optimizer, scheduler, 55)


def scaler(**settings: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **settings)


@pytest.mark.field_report("BR-084")
def test_scale_and_growth_tracker_are_restored() -> None:
    mine = scaler(init_scale=256.0)
    weight = nn.Parameter(torch.ones(1))
    optimizer = SGD([weight], lr=0.1)
    torch.autograd.backward(mine.scale(weight.sum()))
    mine.step(optimizer)
    mine.update()
    saved = save({"scaler": mine})
    again = scaler()
    load(saved, {"scaler": again})
    assert again.state_dict() == mine.state_dict()
    assert again.get_scale() == 256.0
    assert again._growth_tracker == 1 or again.state_dict()["_growth_tracker"] == 1
    for source, into in ((saved, scaler(enabled=False)), (save({"scaler": scaler(enabled=False)}), scaler())):
        with pytest.raises(UsageError) as caught:
            load(source, {"scaler": into})
        assert caught.value.kind is ErrorKind.MISMATCH
        assert "scaler.scale" in str(caught.value)


class Thing:
    """State of a user's own making: grows while it is used."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


STATE = {
    "ema": [torch.randn(3), {"decay": 0.9, "steps": (1, torch.ones(2))}],
    "buffer": torch.randn(4, 2),
    "rank": {0: "a", (1, 2): torch.zeros(0, 2)},
    "position": 7,
}


def test_state_is_handed_over_as_it_was_in_tensors_of_its_own() -> None:
    saved = save({"thing": Thing(STATE)})
    template = copy.deepcopy(STATE)
    for present in ({}, {"buffer": torch.zeros(0, 2)}, template):
        into = Thing(present)
        load(saved, {"thing": into})
        assert same(into.state, STATE)
        assert into.state["buffer"] is not present.get("buffer")
    assert same(template, STATE)


@pytest.mark.parametrize(
    ("present", "said"),
    [
        ({"position": 1, "absent": 2}, "not in the checkpoint: thing.absent"),
        ({"buffer": torch.zeros(4, 3)}, r"thing.buffer: saved with shape \(4, 2\), wanted with shape \(4, 3\)"),
        ({"buffer": torch.zeros(4, 2).double()}, "thing.buffer: saved as float32, wanted as float64"),
        ({"buffer": torch.zeros(0, 2).double()}, "thing.buffer: saved as float32, wanted as float64"),
        ({"position": {"x": torch.ones(1)}, "ema": {"z": torch.ones(1)}}, "not in the checkpoint: thing.ema.z"),
    ],
)
def test_what_it_has_now_and_the_checkpoint_does_not_is_a_mismatch(present: dict[Any, Any], said: str) -> None:
    into = Thing(dict(present))
    with pytest.raises(UsageError, match=said):
        load(save({"thing": Thing(STATE)}), {"thing": into})
    assert same(into.state, present)


@pytest.mark.parametrize("state", [[1], None, torch.ones(1), {"a": Shard(torch.ones(1), "a", (2,), (0,))}, {"a": len}])
def test_a_state_dict_that_cannot_be_saved_is_refused(state: Any) -> None:
    with pytest.raises(UsageError, match="thing") as caught:
        capture({"thing": Thing(state)}, rank=0, world_size=1)
    assert caught.value.kind is ErrorKind.UNSAVEABLE
