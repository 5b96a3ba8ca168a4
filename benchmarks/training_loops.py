"""Training loops whose steps are timed while they save: dense, with a moving average (EMA), or LoRA on a frozen base.

The optimizer and its state, the moving average and the sizes are real; forward and backward are multiplications of
small matrices on all threads, as many as take the wanted time on the quiet machine, and gradients that are there
already. So the time of a step can be chosen freely, down to half of what a copy of the state takes, and whatever else
uses the machine meanwhile makes the step as much longer as it would a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from limits import copy_s
from measuring import MIB, timed
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

_SIDE = 768


class Weights(nn.Module):
    """Parameters without a forward pass: large ones and, as norms and biases are, small ones."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        large, small = min(nbytes, 16 * MIB) // 4, 4096
        count = max(1, nbytes // (4 * large))
        self.large = nn.ParameterList(nn.Parameter(0.02 * torch.randn(large)) for _ in range(count))
        self.small = nn.ParameterList(nn.Parameter(torch.randn(small)) for _ in range(count))


class Matmuls:
    """Work on all threads that takes a chosen time when nobody else uses the machine."""

    def __init__(self, wanted_s: float) -> None:
        self._left, self._right = torch.randn(_SIDE, _SIDE), torch.randn(_SIDE, _SIDE)
        self._into = torch.empty(_SIDE, _SIDE)
        self._count = 4
        once_s = min(timed(self.run) for _ in range(20)) / 4
        self._count = max(1, round(wanted_s / once_s))

    def run(self) -> None:
        for _ in range(self._count):
            torch.mm(self._left, self._right, out=self._into)


class Work(Protocol):
    """Forward and backward."""

    def run(self) -> None: ...


@dataclass(slots=True)
class Training:
    """A model in training; ``items`` is what is to be saved.

    ``gradients``: what the optimizer is given for those of ``trained``; if there are none, the work has made them.
    """

    items: dict[str, Any]
    trained: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    after_step: Callable[[], None]
    work: Work
    gradients: list[Tensor] = field(default_factory=list)

    def turn(self, fence: Callable[[], None]) -> None:
        """Do one step; ``fence`` is called before the state changes."""
        self.work.run()
        for parameter, gradient in zip(self.trained, self.gradients, strict=False):
            parameter.grad = gradient
        fence()
        self.optimizer.step()
        self.after_step()
        for parameter in self.trained:
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return all tensors by name, flat: what libraries are given that save dictionaries."""
        found: dict[str, Tensor] = {}
        for name, item in self.items.items():
            _flatten(name, item.state_dict(), found)
        return found


KINDS = ("dense", "EMA", "LoRA")


def make_training(kind: str, state_nbytes: int, work_over_copy: float) -> tuple[Training, float]:
    """Return a training of that size, and the seconds that a single-threaded copy of its state takes.

    ``work_over_copy``: how long forward and backward take, in copies of the state.
    """
    torch.manual_seed(0)
    items: dict[str, Any] = {}
    after_step: Callable[[], None] = _nothing
    if kind == "dense":  # weights and two moments
        model: nn.Module = Weights(state_nbytes // 3)
        trained = list(model.parameters())
    elif kind == "EMA":  # the same, and the average
        model = Weights(state_nbytes // 4)
        trained = list(model.parameters())
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))  # type: ignore[no-untyped-call]
        average.update_parameters(model)
        items["average"] = average
        after_step = _updating(average, model)
    else:  # a frozen base that is nearly all of the state, and adapters with their moments
        adapters = state_nbytes // 100
        model = nn.ModuleDict({"base": Weights(state_nbytes - 3 * adapters), "adapters": Weights(adapters)})
        model["base"].requires_grad_(requires_grad=False)
        trained = list(model["adapters"].parameters())
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    training = Training({"model": model, "optimizer": optimizer, **items}, trained, optimizer, after_step, Matmuls(0))
    training.gradients = [0.01 * torch.randn_like(parameter) for parameter in trained]
    training.turn(_nothing)  # the optimizer's state comes to be at its first step
    copied_s = copy_s(sum(tensor.nbytes for tensor in training.state().values()))
    training.work = Matmuls(work_over_copy * copied_s)
    return training, copied_s


def _flatten(name: str, value: object, found: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        found[name] = value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            _flatten(f"{name}.{key}", each, found)


def _updating(average: AveragedModel, model: nn.Module) -> Callable[[], None]:
    return lambda: average.update_parameters(model)


def _nothing() -> None:
    return
