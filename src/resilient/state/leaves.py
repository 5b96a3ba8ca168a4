"""What a capture yields: the named parts of a state, as this process holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from resilient.format import values
from resilient.format.box import Box
from resilient.format.documents import Item, Key


class TensorLeaf(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A box of a named global tensor; a tensor whose local part is no single box yields several leaves of one name.

    ``holders`` are all global ranks that hold exactly this box, in order, so that one of them can store it.
    None: unknown, because a plain tensor does not say which ranks have it too.
    ``rank`` is set for what only this rank has.
    ``alias`` names the leaf that holds the bytes, where two names share one tensor.
    """

    item: str
    name: str
    path: tuple[Key, ...]
    dtype: str
    shape: tuple[int, ...]
    box: Box
    holders: tuple[int, ...] | None
    rank: int | None = None
    alias: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLeaf:
    """A leaf that is no tensor.

    ``data`` is its stored form, encoded at capture: later changes to a live list cannot reach it.
    """

    item: str
    name: str
    path: tuple[Key, ...]
    data: bytes
    rank: int | None = None

    @property
    def value(self) -> Any:
        """The value as it was at capture."""
        return values.decode(self.data)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Captured:
    """All that this process holds of some items.

    ``locals`` are the live elements of each of ``tensors``: shape ``box.size``, any strides, any device; some are the
    very parameters, so read them without gradients. They are apart from the leaves, so that who remembers ``tensors``
    from one save to the next does not keep memory alive that the program has given back (an offloaded model, state
    that is made anew in every step).
    """

    items: tuple[Item, ...]
    tensors: tuple[TensorLeaf, ...]
    locals: tuple[torch.Tensor, ...]
    values: tuple[ValueLeaf, ...]
