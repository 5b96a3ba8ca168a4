"""Which parameters optimizers have stepped since the last save: they should not be what they were."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from resilient.state.items import unwrapped
from resilient.state.leaves import Captured, TensorLeaf
from resilient.state.owners import Owners


class Trained:
    """Watches the optimizers among some items; hooks are removed by `close`."""

    def __init__(self, items: Mapping[str, object]) -> None:
        found = {name: unwrapped(item) for name, item in items.items()}
        self._modules = {name: inner for name, inner in found.items() if isinstance(inner, nn.Module)}
        self._stepped: set[Optimizer] = set()
        optimizers = [inner for inner in found.values() if isinstance(inner, Optimizer)]
        self._hooks = [each.register_step_post_hook(self._on_step) for each in optimizers]
        self._tensors: tuple[TensorLeaf, ...] | None = None
        self._parameters: Sequence[tuple[int, weakref.ref[Tensor]]] = ()

    def take(self, captured: Captured) -> tuple[int, ...]:
        """Return which of the captured leaves are parameters that were trained since this was called last."""
        stepped, self._stepped = self._stepped, set()
        if not stepped:
            return ()
        if self._tensors is not captured.tensors:
            parameters = Owners(self._modules).parameters
            named = [
                (number, parameters.get(f"{leaf.item}.{leaf.name}")) for number, leaf in enumerate(captured.tensors)
            ]
            self._parameters = [(number, weakref.ref(each)) for number, each in named if each is not None]
            self._tensors = captured.tensors
        theirs = {id(each) for one in stepped for group in one.param_groups for each in group["params"]}
        known = [(number, ref()) for number, ref in self._parameters]
        return tuple(number for number, each in known if each is not None and each.requires_grad and id(each) in theirs)

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        for hook in self._hooks:
            hook.remove()

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped.add(optimizer)
