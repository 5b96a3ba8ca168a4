"""What is saved in fault_matrix.py: tensors divided between the ranks, each element known from the value of a save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

Items = dict[str, dict[str, Any]]

_COLUMNS = 256
# How many units of bytes each tensor has. The first is larger than all others together: writers that divide a rank's
# tensors between their threads give it to one of them.
_UNITS = {
    ("model", "w0"): 12,
    **{("model", f"w{n}"): 1 for n in (1, 2, 3)},
    **{("optim", f"m{n}"): 1 for n in range(4)},
}
UNITS = sum(_UNITS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a rank has after a restore: the step that the system names, and the value that all tensors are of.

    ``value`` is None if they are of none, or not all of the same; ``why`` says which.
    """

    step: int | None
    value: int | None
    why: str = ""


def unit_rows(mib: float) -> int:
    """Return the rows of a unit; they can be divided by 1, 2 and 3 ranks."""
    return max(6, round(mib * (1 << 20) / UNITS / _COLUMNS / 4) // 6 * 6)


def nbytes_of_all(mib: float) -> int:
    return UNITS * unit_rows(mib) * _COLUMNS * 4


def make_items(mib: float) -> Items:
    """Make the tensors, zeros, divided between the ranks of the process group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    items: Items = {}
    for (item, name), units in _UNITS.items():
        part = torch.zeros(units * unit_rows(mib) // dist.get_world_size(), _COLUMNS)
        items.setdefault(item, {})[name] = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
    return items


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def fill(items: Items, value: int) -> None:
    """Give every element the one that belongs to a value; 0 is blank."""
    for item, tensors in items.items():
        for name, tensor in tensors.items():
            local(tensor).copy_(_part(item, name, value, local(tensor)))


def copy_into(items: Items, whole: Items) -> None:
    """Take this rank's part of whole tensors; what is not there stays as it is."""
    for item, tensors in items.items():
        for name, tensor in tensors.items():
            if name in whole.get(item, {}):
                part = local(tensor)
                part.copy_(whole[item][name].narrow(0, dist.get_rank() * part.shape[0], part.shape[0]))


def look(items: Items, step: int | None, values: list[int]) -> Found:
    """Say of which value the tensors are."""
    of: dict[str, int | None] = {}
    for item, tensors in items.items():
        for name, tensor in tensors.items():
            part = local(tensor)
            of[f"{item}.{name}"] = next(
                (value for value in (0, *values) if torch.equal(part, _part(item, name, value, part))), None
            )
    kinds = set(of.values())
    if len(kinds) == 1 and None not in kinds:
        return Found(step=step, value=kinds.pop())
    groups = {kind: [name for name, each in of.items() if each == kind] for kind in kinds}
    said = [f"{', '.join(names)}: {_named(kind)}" for kind, names in groups.items()]
    for name in groups.get(None, [])[:1]:
        item, _, tensor_name = name.partition(".")
        part = local(items[item][tensor_name])
        wrong = min(int((part != _part(item, tensor_name, value, part)).sum()) for value in values)
        said.append(f"{wrong} of {part.numel()} elements of {name} are wrong")
    return Found(step=step, value=None, why="; ".join(said))


def _named(kind: int | None) -> str:
    return "of no save" if kind is None else "never filled" if kind == 0 else f"of save {kind}"


def _part(item: str, name: str, value: int, like: Tensor) -> Tensor:
    if value == 0:
        return torch.zeros_like(like)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    number = list(_UNITS).index((item, name))
    whole = torch.empty(like.shape[0] * ranks, _COLUMNS)
    whole.normal_(generator=torch.Generator().manual_seed(1000 * value + number))
    return whole.narrow(0, rank * like.shape[0], like.shape[0])
