"""How a caller says of an item what it does not say itself: whose it is, of what it is a part, when it changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from resilient.errors import ErrorKind, UsageError
from resilient.format.box import Box

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PerRank(Generic[T]):
    """An item that every rank has its own of: stored once per rank, and given back to the rank of the same number.

    Such state cannot be resharded: loading it on another number of ranks is refused.
    """

    value: T


@dataclass(frozen=True, slots=True)
class AfterStep(Generic[T]):
    """An item that changes only between ``optimizer.step()`` and the end of the turn, such as an average of weights.

    It is then copied while the next forward and backward pass run, as parameters are. An item of which this is not true
    need not be declared: it is copied before the next turn begins. May be in `PerRank`, or around it.
    """

    value: T


class Shard:
    """A part of a tensor that is spread over ranks without being a DTensor: expert, pipeline, Megatron-style tensors.

    Args:
        tensor: this rank's part.
        name: what the whole is called; the same on all ranks that have a part of it, unique in its item.
        global_shape: the shape of the whole.
        offset: where ``tensor`` begins in the whole, one index per dimension.

    Raises:
        UsageError: the part does not lie inside the whole.
    """

    __slots__ = ("box", "global_shape", "name", "tensor")

    def __init__(self, tensor: torch.Tensor, name: str, global_shape: Sequence[int], offset: Sequence[int]) -> None:
        self.tensor = tensor
        self.name = name
        self.global_shape = tuple(global_shape)
        self.box = Box(tuple(offset), tuple(tensor.shape))
        if len(self.box.offset) != tensor.dim() or not self.box.within(self.global_shape):
            raise UsageError(
                f"Shard {name!r}: shape {tuple(tensor.shape)} at {tuple(offset)} is not inside {self.global_shape}",
                kind=ErrorKind.INVALID_ARGUMENT,
                hint="global_shape and offset have one entry for each dimension of the tensor",
            )

    def __repr__(self) -> str:
        return f"Shard({self.name!r}, {self.box} of {self.global_shape}, {math.prod(self.box.size)} elements)"
