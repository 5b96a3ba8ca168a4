"""Whether the state is that of a step boundary: no gradient pending, nothing changed since.

Seen from tracked optimizers: each of their steps marks the gradients that are there as used. A gradient that is not
marked, or has changed since, came from a backward pass after the last optimizer step: it is state that no
checkpoint has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import torch
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from resilient.state.items import unwrapped

# On the gradient itself: the address of a gradient that is gone may be that of the next one.
_USED: Final = "resilient_used_at"


class BoundaryWatch:
    """Watches the optimizers, scalers and FSDP modules among some items; hooks are removed by `close`.

    Without an optimizer among them every moment looks like a boundary.
    """

    def __init__(self, items: Mapping[str, object]) -> None:
        found = [unwrapped(item) for item in items.values()]
        self._optimizers = [each for each in found if isinstance(each, Optimizer)]
        self._scalers = [each for each in found if isinstance(each, torch.amp.GradScaler)]
        self._modules = [each for each in found if isinstance(each, torch.nn.Module)]
        self._hooks: list[RemovableHandle] = [each.register_step_post_hook(self._on_step) for each in self._optimizers]
        self.stepped = False
        self._scaler_versions = self._read_scalers()
        self._mark_used()

    @property
    def blind(self) -> bool:
        """Whether there is no optimizer to watch, so that nobody can tell a boundary from the middle of a step."""
        return not self._optimizers

    def end_turn(self) -> None:
        """End a turn: `stepped` is about the next one from now on."""
        scaler_versions = self._read_scalers()
        if scaler_versions != self._scaler_versions and not self.stepped:
            # A GradScaler that found infinities leaves the optimizer's step out: no hook, and still the gradients
            # are done with.
            self._mark_used()
        self._scaler_versions = scaler_versions
        self.stepped = False

    def pending(self) -> bool:
        """Say whether there are gradients that no optimizer step has used."""
        if any(True for _ in self._unreduced()):
            return True
        unused = [grad for grad in self._gradients() if getattr(grad, _USED, None) != grad._version]  # noqa: SLF001
        # Gradients zeroed in place have changed too, and hold nothing. Looked at last: on an accelerator this waits
        # for it.
        return any(bool(grad.any()) for grad in unused)

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        for hook in self._hooks:
            hook.remove()

    def _on_step(self, *_: object) -> None:
        self.stepped = True
        # Those of all optimizers: in a GAN, the backward pass of the generator leaves gradients in the discriminator.
        self._mark_used()

    def _mark_used(self) -> None:
        for grad in self._gradients():
            setattr(grad, _USED, grad._version)  # noqa: SLF001 -- the documented way to see changes

    def _gradients(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        # FSDP2 adds to the local part behind the DTensor's back: only that one's version moves.
                        yield getattr(parameter.grad, "_local_tensor", parameter.grad)

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


def _fsdp_modules(roots: Iterable[torch.nn.Module]) -> Iterator[FSDPModule]:
    for root in roots:
        for module in root.modules():
            if isinstance(module, FSDPModule):
                yield module
