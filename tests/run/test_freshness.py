"""An alarm, once, if a training that steps its optimizers saves the same parameters twice; none for anything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import resilient
from resilient.events import StateUnchanged
from resilient.run.session import Run

STEPS = 5


class Model(nn.Module):
    """A part that may be frozen, a head, and a counter that always moves."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 1)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        found: torch.Tensor = self.head(self.body(batch))
        return found


Trains = Callable[[Run, Model, torch.optim.Optimizer], None]


def alarms(place: Path, *, lr: float, prepare: Callable[[Model], object], turn: Trains) -> list[tuple[int, int]]:
    """Train, with a save at each boundary; return the alarms: at which step, and since which."""
    heard: list[tuple[int, int]] = []

    @resilient.train(place, every=10**6)
    def main(run: Run) -> None:
        run._bus.subscribe(
            lambda event: heard.append((event.step, event.since)) if isinstance(event, StateUnchanged) else None
        )
        torch.manual_seed(0)
        model = Model()
        prepare(model)
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=lr)
        run.track(model=model, optimizer=optimizer)
        for _ in run.steps(range(STEPS), total=STEPS):
            run.save().wait(30)
            turn(run, model, optimizer)

    main()
    return heard


def step(run: Run, model: Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()


def forgotten(run: Run, model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Compute on a copy, as after a wrapper that was made anew: the optimizer's parameters get no gradients."""
    copy = Model()
    optimizer.zero_grad()
    copy(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()
    model.seen += 1


def nothing(run: Run, model: Model, optimizer: torch.optim.Optimizer) -> None:
    model.seen += 1


def keep(model: Model) -> None:
    pass


def freeze(model: Model) -> None:
    model.body.requires_grad_(requires_grad=False)


@pytest.mark.parametrize(
    ("lr", "turn", "alarm"),
    [(0.0, step, (2, 1)), (1e-2, forgotten, (1, 0))],  # the first step gives AdamW its state: another structure
    ids=["learning rate 0", "other parameters than the model's"],
)
def test_what_training_does_not_change_is_an_alarm_once(
    lr: float, turn: Trains, alarm: tuple[int, int], tmp_path: Path
) -> None:
    assert alarms(tmp_path, lr=lr, prepare=keep, turn=turn) == [alarm]


@pytest.mark.parametrize("prepare", [keep, freeze], ids=["all", "a frozen part"])
def test_a_training_that_trains_is_none(prepare: Callable[[Model], object], tmp_path: Path) -> None:
    assert alarms(tmp_path, lr=1e-2, prepare=prepare, turn=step) == []


def test_what_no_optimizer_has_stepped_is_none(tmp_path: Path) -> None:
    assert alarms(tmp_path, lr=1e-2, prepare=keep, turn=nothing) == []
