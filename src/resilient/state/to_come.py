"""How much state optimizers will make in their first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from resilient.state.items import unwrapped

_UNKNOWN: Final = 2.0
_STATES: Final = {
    "Adadelta": 2.0,
    "Adafactor": 0.1,  # a row and a column instead of a matrix
    "Adagrad": 0.0,  # has its state from the beginning
    "Adamax": 2.0,
    "ASGD": 1.0,
    "Muon": 1.0,
    "NAdam": 2.0,
    "RAdam": 2.0,
    "Rprop": 2.0,
    "SparseAdam": 2.0,
}
"""Tensors of a parameter's size that an optimizer keeps for each parameter."""


def state_to_come(items: Mapping[str, object]) -> int:
    """Return about how many bytes of optimizer state this process does not have yet; 0 after the first step."""
    return sum(
        _missing(optimizer, group)
        for item in items.values()
        if isinstance(optimizer := unwrapped(item), Optimizer)
        for group in optimizer.param_groups
    )


def _missing(optimizer: Optimizer, group: Mapping[str, Any]) -> int:
    parameters = [each for each in group["params"] if each.requires_grad and not optimizer.state.get(each)]
    return int(_states(type(optimizer).__name__, group) * sum(map(_local_nbytes, parameters)))


def _states(name: str, group: Mapping[str, Any]) -> float:
    if name in ("Adam", "AdamW"):
        return 3.0 if group.get("amsgrad") else 2.0
    if name == "SGD":
        return 1.0 if group.get("momentum") else 0.0
    if name == "RMSprop":
        return 1.0 + bool(group.get("momentum")) + bool(group.get("centered"))
    return _STATES.get(name, _UNKNOWN)


def _local_nbytes(parameter: Tensor) -> int:
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter  # noqa: SLF001 -- only its size
    return local.numel() * local.element_size()
