"""How much state optimizers will make: known before they do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from resilient.state.to_come import state_to_come
from resilient.state.wrappers import PerRank

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": Adam,
    "adam with three": lambda parameters: Adam(parameters, amsgrad=True),
    "adamw": AdamW,
    "sgd": SGD,
    "sgd with momentum": lambda parameters: SGD(parameters, momentum=0.9),
    "rmsprop": RMSprop,
    "rmsprop with more": lambda parameters: RMSprop(parameters, momentum=0.9, centered=True),
    "adagrad": Adagrad,
    "adadelta": Adadelta,
    "adamax": Adamax,
    "nadam": NAdam,
    "radam": RAdam,
    "rprop": Rprop,
    "asgd": ASGD,
}


def nbytes(optimizer: Optimizer) -> int:
    found: Iterable[object] = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in found if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_is_predicted_is_what_the_first_step_makes(kind: str) -> None:
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50, dtype=torch.float64))
    model[1].bias.requires_grad_(False)
    optimizer = OPTIMIZERS[kind](model.parameters())
    items = {"model": model, "optimizer": PerRank(optimizer)}
    predicted = nbytes(optimizer) + state_to_come(items)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    assert abs(predicted - nbytes(optimizer)) < 200, "but for the counters"
    assert state_to_come(items) == 0
