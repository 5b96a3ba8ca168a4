"""What the state of an optimizer is, by parameter name instead of by index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch.optim import Optimizer

from resilient.state.gathering import Gathering
from resilient.state.owners import Owners
from resilient.state.trees import Leaf, holds_tensor, leaves


def gather_optimizer(optimizer: Optimizer, into: Gathering, owners: Owners) -> None:
    """Take the groups, the state of each parameter, and what an optimizer keeps under other keys.

    ``param_groups.<i>`` is one value: the hyperparameters, with the parameters' names as ``params``. Hyperparameters
    that are tensors (the learning rate of a capturable optimizer) are leaves below it.
    """
    for index, group in enumerate(optimizer.param_groups):
        names = [owners.names(into.item, parameter)[0] for parameter in group["params"]]
        plain, tensors = split_group(group)
        into.value(("param_groups", index), {"params": names, **plain})
        for leaf in leaves(tensors, ("param_groups", index)):
            into.leaf(leaf)
    for leaf in state_leaves(optimizer, into.item, owners):
        into.leaf(leaf)


def split_group(group: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a group's hyperparameters: those without and those with tensors.

    ``param_names`` are not among them: they follow the order of ``params``, which is this process's own.
    """
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    plain = {key: value for key, value in settings.items() if not holds_tensor(value)}
    return plain, {key: value for key, value in settings.items() if key not in plain}


def state_leaves(optimizer: Optimizer, item: str, owners: Owners) -> Iterator[Leaf]:
    """Yield the state: below ``state`` and the parameter's name, or below ``other`` and a key that is no parameter."""
    # torch types all keys as tensors, and lets optimizers use others.
    for key, state in cast("Mapping[object, Any]", optimizer.state).items():
        if isinstance(key, torch.Tensor):
            yield from leaves(state, ("state", owners.names(item, key)[0]))
        else:
            yield from leaves({key: state}, ("other",))
