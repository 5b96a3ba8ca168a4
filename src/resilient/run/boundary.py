"""Whether the state is that of a step boundary: no gradient pending, nothing changed since.

Seen from tracked optimizers: each of their steps marks its own gradients as used. A gradient that is not marked, or has
changed since, came from a backward pass after that optimizer's last step: it is state that no checkpoint has.

What another optimizer's step finds unused is *left*. It may be accumulated for a step that comes some turns later, or,
as in a GAN whose generator's backward pass leaves gradients in the discriminator, be zeroed before it is used; nobody
can tell until then, so it is pending like any other. A turn that always ends with gradients left never comes to a
boundary: whoever waits for one says so and calls `disregard_left` in the end, or the loop zeroes them.

Without an optimizer the only sign is that tensors have changed since the boundary that `hold` was called at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import torch
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from resilient.state.items import unwrapped
from resilient.state.trees import leaves

# On the gradient itself: the address of a gradient that is gone may be that of the next one.
_USED: Final = "resilient_used_at"
_LEFT: Final = "resilient_left_at"


class BoundaryWatch:
    """Watches the optimizers, scalers and FSDP modules among some items; hooks are removed by `close`.

    Without an optimizer among them, the tensors of modules and dictionaries are watched.
    """

    def __init__(self, items: Mapping[str, object]) -> None:
        found = [unwrapped(item) for item in items.values()]
        self._optimizers = [each for each in found if isinstance(each, Optimizer)]
        self._scalers = [each for each in found if isinstance(each, torch.amp.GradScaler)]
        self._modules = [each for each in found if isinstance(each, torch.nn.Module)]
        self._trees = [each for each in found if isinstance(each, dict)]
        self._disregards_left = False
        self._hooks: list[RemovableHandle] = [each.register_step_post_hook(self._on_step) for each in self._optimizers]
        self.stepped = False
        self._scaler_versions = self._read_scalers()
        self._mark(self._optimizers, _USED)
        self._held = self._tensors()

    @property
    def blind(self) -> bool:
        """Whether there is no optimizer to watch, so that nobody can tell when a step is complete."""
        return not self._optimizers

    def end_turn(self) -> None:
        """End a turn: `stepped` is about the next one from now on."""
        scaler_versions = self._read_scalers()
        if scaler_versions != self._scaler_versions and not self.stepped and len(self._optimizers) == 1:
            # A GradScaler that found infinities leaves the optimizer's step out: no hook, and still the gradients
            # are done with. Of several optimizers nobody knows which it was: theirs are pending until the next step.
            self._mark(self._optimizers, _USED)
        self._scaler_versions = scaler_versions
        self.stepped = False
        self.hold()

    def hold(self) -> None:
        """Remember this moment as the boundary that `changed` is about."""
        self._held = self._tensors()

    def changed(self) -> bool:
        """Say whether tracked tensors have changed since the boundary; looked at only where there is no optimizer."""
        return self._held != self._tensors()

    def pending(self) -> bool:
        """Say whether there are gradients that no step of their own optimizer has used."""
        marks = (_USED, _LEFT) if self._disregards_left else (_USED,)
        return any(True for _ in self._unreduced()) or self._is_any_without(*marks)

    def only_left(self) -> bool:
        """Say whether all that may be pending was there already when another optimizer stepped last."""
        return not any(True for _ in self._unreduced()) and not self._is_any_without(_USED, _LEFT)

    def disregard_left(self) -> None:
        """Take what another optimizer's step leaves for discarded, from now on."""
        self._disregards_left = True

    def advice(self) -> str | None:
        """Return what helps against pending gradients, where that is known."""
        if not self.only_left():
            return None
        return "if they are not needed, call zero_grad() of every optimizer at the end of each turn"

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        for hook in self._hooks:
            hook.remove()

    def _on_step(self, optimizer: Optimizer, *_: object) -> None:
        self.stepped = True
        self._mark(self._optimizers, _LEFT)
        self._mark([optimizer], _USED)

    def _mark(self, optimizers: Iterable[Optimizer], mark: str) -> None:
        for grad in _gradients(optimizers):
            setattr(grad, mark, grad._version)  # noqa: SLF001 -- the documented way to see changes

    def _is_any_without(self, *marks: str) -> bool:
        unused = [
            grad
            for grad in _gradients(self._optimizers)
            if all(getattr(grad, mark, None) != grad._version for mark in marks)  # noqa: SLF001 -- as above
        ]
        # Gradients zeroed in place have changed too, and hold nothing. Looked at last: on an accelerator this waits
        # for it.
        return any(bool(grad.any()) for grad in unused)

    def _tensors(self) -> list[tuple[int, int]]:
        """Return address and version of what is tracked: no step is seen where there is no optimizer."""
        if not self.blind:
            return []
        found: list[torch.Tensor] = []
        for module in self._modules:
            found += [*module.parameters(), *module.buffers()]
        for tree in self._trees:
            found += [leaf.content for leaf in leaves(tree) if isinstance(leaf.content, torch.Tensor)]
        local = [getattr(tensor, "_local_tensor", tensor) for tensor in found]
        return [
            (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)  # noqa: SLF001 -- as above
            for tensor in local
        ]

    def _unreduced(self) -> Iterator[torch.Tensor]:
        """Yield what FSDP2 keeps apart from the gradients while ``set_requires_gradient_sync(False)`` holds."""
        for module in _fsdp_modules(self._modules):
            for group in module._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001 -- there is no public view of it
                for parameter in group.fsdp_params:
                    whole = getattr(parameter, "_unsharded_param", None)  # there is none before the first forward pass
                    for grad in (parameter.unsharded_accumulated_grad, None if whole is None else whole.grad):
                        if grad is not None:
                            yield grad

    def _read_scalers(self) -> list[int]:
        # update() changes the scale in place; its value would have to be fetched from the device, its version is here.
        scales = [scaler._scale for scaler in self._scalers]  # noqa: SLF001 -- the public accessor waits for the device
        return [0 if scale is None else scale._version for scale in scales]  # noqa: SLF001 -- as above


def _gradients(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    # FSDP2 adds to the local part behind the DTensor's back: only that one's version moves.
                    yield getattr(parameter.grad, "_local_tensor", parameter.grad)


def _fsdp_modules(roots: Iterable[torch.nn.Module]) -> Iterator[FSDPModule]:
    for root in roots:
        for module in root.modules():
            if isinstance(module, FSDPModule):
                yield module
