"""How long a rank computes before it has to wait for any other one, by the clock of the processor.

In synchronous training all ranks' steps take equally long: who is quick waits for the others in the exchange. What a
rank needs by itself is the time from its batch to the first gradient of the backward pass; the exchange of gradients
begins after that. Where no gradient can be seen (sharded modules keep theirs elsewhere) the end of the model's forward
pass stands for it, which may contain exchanges. On an accelerator this is the time in which work is *submitted*, unless
something in the forward pass waits for it: a slow device is not seen here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.state.items import unwrapped

_FORWARD = -1


class Compute:
    """Finds out in the first turn which gradient comes first, and looks at that one alone afterwards."""

    def __init__(self, items: Mapping[str, object], *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._began_s: float | None = None
        self._ended_s: float | None = None
        self._first: int | None = None
        self._calibrated = False
        self._hooks: dict[int, RemovableHandle] = {}
        self._forward: list[RemovableHandle] = []
        modules = [inner for item in items.values() if isinstance(inner := unwrapped(item), nn.Module)]
        for module in modules:
            self._forward.append(module.register_forward_hook(self._after_forward))
            for parameter in module.parameters():
                if parameter.requires_grad and parameter.is_leaf:
                    number = len(self._hooks)
                    hook = functools.partial(self._on_gradient, number)
                    register: Any = parameter.register_post_accumulate_grad_hook  # without types in torch 2.13
                    self._hooks[number] = register(hook)

    def begin(self) -> None:
        """Begin a turn."""
        self._ended_s, self._began_s = None, self._clock.monotonic()

    def end(self) -> float | None:
        """End it; return how many seconds it has computed, None if nothing shows that."""
        began_s, self._began_s = self._began_s, None
        if not self._calibrated and self._first is not None:
            self._calibrate()
        return None if began_s is None or self._ended_s is None else self._ended_s - began_s

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        for hook in (*self._hooks.values(), *self._forward):
            hook.remove()
        self._hooks, self._forward = {}, []

    def _calibrate(self) -> None:
        self._calibrated = True
        kept = self._hooks.pop(self._first) if self._first in self._hooks else None
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        if kept is not None and self._first is not None:
            self._hooks[self._first] = kept
            for hook in self._forward:
                hook.remove()
            self._forward = []

    def _on_gradient(self, number: int, parameter: object) -> None:  # noqa: ARG002 -- the signature of a hook
        if self._began_s is not None and (self._first is None or self._first == _FORWARD):
            self._first, self._ended_s = number, self._clock.monotonic()
        elif self._ended_s is None and number == self._first:
            self._ended_s = self._clock.monotonic()

    def _after_forward(self, *_: object) -> None:
        # A program may call a module inside of a function that it compiles: there must be nothing here to trace.
        if torch.compiler.is_compiling() or self._began_s is None or self._first not in (None, _FORWARD):
            return
        self._first = _FORWARD
        if self._ended_s is None:
            self._ended_s = self._clock.monotonic()
