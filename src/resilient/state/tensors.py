"""Which tensors can be stored, and what their dtypes are called."""

from __future__ import annotations

import functools
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from resilient.errors import ErrorKind, UsageError
from resilient.format.dtypes import ITEMSIZE

_PLAIN = (torch.Tensor, torch.nn.Parameter, DTensor)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name: ``float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a short name; raise `UsageError` if this torch has none of that name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(
            f"torch {torch.__version__} has no dtype {name!r}",
            kind=ErrorKind.UNSAVEABLE,
            hint="load with the version of torch that saved it, or a newer one",
        )
    return found


def why_unsaveable(tensor: torch.Tensor) -> str | None:
    """Say why a tensor cannot be stored or filled, or return None if it can.

    Only plain tensors, parameters and DTensors: what another subclass is, is more than the elements that it shows
    (quantized weights, nested tensors), and storing those would lose the rest.
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):  # nearly all are, and there may be 100,000
        return _why_without_elements(tensor)
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return "a lazy parameter that has no shape yet (run the module once)"
    if type(tensor) not in _PLAIN:
        return f"a tensor of type {_type_name(tensor)}"
    if not isinstance(tensor, DTensor):
        return _why_without_elements(tensor)
    local = local_of(tensor)
    return f"a DTensor of {_type_name(local)}" if type(local) is not torch.Tensor else _why_without_elements(local)


def is_simple(content: Any) -> TypeGuard[torch.Tensor]:
    """Say whether this is a plain tensor whose memory holds its elements, in their order, as they are."""
    return (
        type(content) in (torch.Tensor, torch.nn.Parameter)
        and content.layout is torch.strided
        and not (content.is_nested or content.is_meta or content.is_neg() or content.is_conj())
        and content.is_contiguous()
    )


def _why_without_elements(tensor: torch.Tensor) -> str | None:
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    if dtype_name(tensor.dtype) not in ITEMSIZE:
        return f"a tensor of dtype {dtype_name(tensor.dtype)}"  # the quantized ones are among them
    return "a tensor on the meta device (materialize it first: Module.to_empty)" if tensor.is_meta else None


def _type_name(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def local_of(tensor: DTensor) -> torch.Tensor:
    """Return the part of a DTensor that this process holds: the live storage, detached."""
    with torch.no_grad():  # to_local would return a copy's view in the autograd graph
        return tensor.to_local().detach()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements, row-major, in one dimension of stride 1; in their own memory if they lie so.

    A tensor of one element counts as contiguous whatever its strides are, and ``view`` to another dtype refuses it.
    """
    found = tensor.contiguous().reshape(-1)
    return found.as_strided((1,), (1,)) if found.numel() == 1 else found


def empty_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without content, laid out over ranks, devices and memory like another."""
    if not isinstance(tensor, DTensor):
        # clone's rules, not the strides themselves: an expanded tensor's copy has an element for every index.
        return torch.empty_like(tensor.detach(), dtype=dtype, memory_format=torch.preserve_format)
    return DTensor.from_local(
        torch.empty_like(local_of(tensor), dtype=dtype),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
