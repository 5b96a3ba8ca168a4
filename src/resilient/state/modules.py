"""Which tensors and values a module has, under the names that it would have without its wrappers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from resilient.errors import ErrorKind, UsageError
from resilient.state.names import canonical


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slot:
    """A parameter or persistent buffer. ``only_holder``: the one rank whose copy counts, or None."""

    name: str
    tensor: Tensor
    only_holder: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExtraState:
    """What a submodule's ``get_extra_state`` returns, and the submodule that takes it back."""

    name: str
    owner: nn.Module


def ready(item: str, module: nn.Module) -> None:
    """Bring a module into the form in which its own tensors are the state, or refuse it by name.

    FSDP2 may hold gathered parameters at a step boundary (``reshard_after_backward=False``, or a root after an
    evaluation): those are copies, and the optimizer's are the sharded ones.

    Raises:
        UsageError: FSDP1, whose parameters are pieces of flat ones.
    """
    for each in module.modules():
        if isinstance(each, FullyShardedDataParallel):
            raise UsageError(
                f"{item}: a {type(each).__name__} (FSDP1) keeps flattened parameters that belong to no layout",
                kind=ErrorKind.UNSAVEABLE,
                hint="use torch.distributed.fsdp.fully_shard (FSDP2)",
            )
        if isinstance(each, FSDPModule):
            each.reshard()


def slots(item: str, module: nn.Module) -> list[Slot | ExtraState]:
    """Return what ``module.state_dict()`` would name, as live objects, in its order.

    The module is walked rather than asked: hooks of ``state_dict`` may return copies, and a load would then fill those.
    """
    found = list(_walk(item, module, (), frozenset(), None))
    # A module's own attribute may be called like a wrapper's. Where dropping it would make two names one, it stays.
    counts = Counter(canonical(raw) for raw, _, _ in found)
    named: list[Slot | ExtraState] = []
    for raw, content, only_holder in found:
        name = canonical(raw) if counts[canonical(raw)] == 1 else raw
        if isinstance(content, nn.Module):
            named.append(ExtraState(name=name, owner=content))
        else:
            named.append(Slot(name=name, tensor=content, only_holder=only_holder))
    return named


def _walk(
    item: str, module: nn.Module, at: tuple[str, ...], broadcast: frozenset[int], source: int | None
) -> Iterator[tuple[str, Tensor | nn.Module, int | None]]:
    if isinstance(module, DistributedDataParallel) and module.broadcast_buffers:
        # Buffers of the other ranks legitimately differ (running statistics of their own batches) until rank 0's are
        # broadcast before the next forward: rank 0's are the state.
        broadcast = broadcast | {id(buffer) for buffer in module.modules_buffers}
        source = dist.get_global_rank(module.process_group, 0)
    parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    transient = module._non_persistent_buffers_set  # noqa: SLF001 -- torch has no public name for it
    buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
    buffers = {name: buffer for name, buffer in buffers.items() if name not in transient}
    _refuse_hidden(item, module, at, parameters.keys() | buffers.keys())
    for name, parameter in parameters.items():
        yield ".".join((*at, name)), parameter, None
    for name, buffer in buffers.items():
        yield ".".join((*at, name)), buffer, source if id(buffer) in broadcast else None
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield ".".join((*at, "_extra_state")), module, None
    for name, child in module._modules.items():  # noqa: SLF001 -- named_children drops a module's second name
        if child is not None:
            yield from _walk(item, child, (*at, name), broadcast, source)


def _refuse_hidden(item: str, module: nn.Module, at: tuple[str, ...], known: set[str]) -> None:
    """Raise if a module saves more than parameters and buffers (packed weights): that would be lost without a word."""
    if type(module)._save_to_state_dict is nn.Module._save_to_state_dict:  # noqa: SLF001 -- the hook for subclasses
        return
    saved: dict[str, Any] = {}
    module._save_to_state_dict(saved, "", True)  # noqa: SLF001 -- as above
    hidden = sorted(saved.keys() - known - {"_extra_state"})
    if hidden:
        raise UsageError(
            f"{item}: {'.'.join(at) or 'the module'} ({type(module).__qualname__}) saves {', '.join(hidden)} itself",
            kind=ErrorKind.UNSAVEABLE,
            hint="keep the state in parameters and buffers, or in get_extra_state and set_extra_state",
        )
