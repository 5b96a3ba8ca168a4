"""What a parameter is called, whatever its module is wrapped in."""

from __future__ import annotations

from typing import Final

_WRAPPED: Final = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""The attributes under which DDP, averaged models, torch.compile, FSDP and activation checkpointing keep a module."""


def canonical(fqn: str) -> str:
    """Return a dotted name without the segments that wrappers add, wherever in it they are.

    >>> canonical("module._orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    *owners, last = fqn.split(".")
    return ".".join([*(each for each in owners if each not in _WRAPPED), last])
