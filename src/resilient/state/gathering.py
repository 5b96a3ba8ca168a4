"""The leaves of one item, as they are found: checked, named once, placed."""

from __future__ import annotations

import torch

from resilient.errors import ErrorKind, UsageError
from resilient.format import values
from resilient.format.documents import Key
from resilient.state import torch_values  # noqa: F401 -- teaches the codec the types of torch
from resilient.state.leaves import TensorLeaf, ValueLeaf
from resilient.state.sharding import Placed, UnknownLayoutError, place
from resilient.state.tensors import dtype_name, why_unsaveable
from resilient.state.trees import Leaf, Path, name_of
from resilient.state.wrappers import Shard


def checked_place(item: str, name: str, tensor: torch.Tensor) -> Placed:
    """Return where a tensor's elements lie; raise `UsageError` naming it if it cannot be stored or filled."""
    try:
        reason = why_unsaveable(tensor)
        if reason is None:
            return place(tensor)
    except UnknownLayoutError as error:
        reason = str(error)
    raise UsageError(
        f"{item}: {name} is {reason}, which cannot be saved or loaded",
        kind=ErrorKind.UNSAVEABLE,
        hint="hold it as plain tensors (for a DTensor: placed as Shard or Replicate), or leave it out",
    )


class Gathering:
    """Collects what this process holds of one item.

    ``locals`` are the live elements of each of ``tensors``. ``counts`` says for each tensor that was taken how many
    leaves it has become.
    """

    def __init__(self, item: str, *, rank: int, world_size: int, per_rank: bool) -> None:
        self.item = item
        self.tensors: list[TensorLeaf] = []
        self.locals: list[torch.Tensor] = []
        self.counts: list[int] = []
        self.values: list[ValueLeaf] = []
        self._rank = rank
        self._world_size = world_size
        self._per_rank = per_rank
        self._names: dict[str, bool] = {}  # whether the name is that of Shards, which may be several
        # By identity. The tensors are kept too: the id of a temporary would be used again while it is in this table.
        self._first: dict[int, tuple[torch.Tensor, str]] = {}

    def leaf(self, leaf: Leaf) -> None:
        """Take a leaf of a nested container."""
        if isinstance(leaf.content, Shard):
            self.shard(leaf.content)
        elif isinstance(leaf.content, torch.Tensor):
            self.tensor(leaf.path, leaf.content)
        else:
            self.value(leaf.path, leaf.content)

    def tensor(self, path: Path, tensor: torch.Tensor, *, only_holder: int | None = None) -> None:
        """Take a tensor; one that was taken before under another name becomes an alias of that name.

        ``only_holder``: the one rank whose copy is meant, if the copies of the others may legitimately differ.
        """
        name = self._name(path)
        placed = checked_place(self.item, name, tensor)
        if only_holder is not None and only_holder != self._rank and not self._per_rank:
            self.counts.append(0)
            return
        _, first = self._first.setdefault(id(tensor), (tensor, name))
        parts = placed.parts[:1] if first != name else placed.parts
        self.counts.append(len(parts))
        for box, local in parts:
            self.locals.append(resolved(local))
            self.tensors.append(
                TensorLeaf(
                    item=self.item,
                    name=name,
                    path=path,
                    dtype=dtype_name(tensor.dtype),
                    shape=placed.shape,
                    box=box,
                    holders=self._holders(placed.holders if only_holder is None else (only_holder,)),
                    rank=self._rank if self._per_rank else None,
                    alias=None if first == name else first,
                )
            )

    def shard(self, shard: Shard) -> None:
        """Take a declared part of a tensor; several parts of one tensor share its name."""
        path: tuple[Key, ...] = (shard.name,)
        name = self._name(path, shared=True)
        placed = checked_place(self.item, name, shard.tensor)
        if placed.holders is not None:
            raise UsageError(
                f"{self.item}: {name} is a Shard of a DTensor",
                kind=ErrorKind.UNSAVEABLE,
                hint="a DTensor says itself which part it is: pass it as it is",
            )
        self.counts.append(1)
        self.locals.append(resolved(placed.parts[0][1]))
        self.tensors.append(
            TensorLeaf(
                item=self.item,
                name=name,
                path=path,
                dtype=dtype_name(shard.tensor.dtype),
                shape=shard.global_shape,
                box=shard.box,
                holders=self._holders(None),
                rank=self._rank if self._per_rank else None,
            )
        )

    def value(self, path: Path, value: object) -> None:
        """Take a value: encoded now, so that what is stored is what it is now."""
        name = self._name(path)
        try:
            data = values.encode(value)
        except values.Unsaveable as error:
            raise unsaveable(self.item, name, error) from None
        rank = self._rank if self._per_rank else None
        self.values.append(ValueLeaf(item=self.item, name=name, path=path, data=data, rank=rank))

    def _holders(self, known: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if self._per_rank or self._world_size == 1:
            return (self._rank,)
        return known

    def _name(self, path: Path, *, shared: bool = False) -> str:
        name = name_of(path)
        if name in self._names and not (shared and self._names[name]):
            raise UsageError(
                f"{self.item}: two leaves are called {name}",
                kind=ErrorKind.NAME_COLLISION,
                hint="rename one of them: names are dotted paths, without the prefixes of wrappers",
            )
        self._names[name] = shared
        return name


def resolved(local: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory has its values: a lazy conjugate or negative is computed."""
    return local.resolve_conj().resolve_neg() if local.is_conj() or local.is_neg() else local


def unsaveable(item: str, name: str, error: values.Unsaveable) -> UsageError:
    """Return the error that names a value that cannot be stored by item, path and type."""
    where = ".".join([name, *(str(key) for key in error.path)])
    kind = type(error.value)
    what = error.reason or f"a {kind.__qualname__} ({kind.__module__})"
    return UsageError(
        f"{item}: {where} is {what}, which cannot be saved",
        kind=ErrorKind.UNSAVEABLE,
        hint="leave it out, turn it into tensors and plain values, or teach it to resilient.format.values.register",
    )
