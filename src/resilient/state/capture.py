"""Take items apart into named tensors and values, as this process holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from resilient.format import values
from resilient.format.documents import Item
from resilient.state.gathering import Gathering, unsaveable
from resilient.state.items import described, own, tree_of, unwrapped
from resilient.state.leaves import Captured
from resilient.state.modules import Slot
from resilient.state.optimizers import gather_optimizer
from resilient.state.owners import Owners
from resilient.state.trees import leaves


def capture(items: Mapping[str, object], *, rank: int, world_size: int) -> Captured:
    """Return what this process holds of some items: live tensors, nothing copied; values encoded now.

    Args:
        items: modules, optimizers, anything with ``state_dict`` and ``load_state_dict``, nested dictionaries, `Rng`, or
            `PerRank` or `AfterStep` of one of them, by name.
        rank: the global rank of this process.
        world_size: how many processes save together.

    Raises:
        UsageError: something cannot be saved, named by item, path and type; two leaves have one name; an optimizer has
            a parameter that none of the modules owns.
    """
    return captured_of(gather(items, rank=rank, world_size=world_size))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gathered:
    """What a capture has found, item by item, and who owns which parameter."""

    items: tuple[Item, ...]
    found: tuple[Gathering, ...]
    owners: Owners


def captured_of(gathered: Gathered) -> Captured:
    """Return what was gathered as one."""
    return Captured(
        items=gathered.items,
        tensors=tuple(leaf for each in gathered.found for leaf in each.tensors),
        locals=tuple(local for each in gathered.found for local in each.locals),
        values=tuple(leaf for each in gathered.found for leaf in each.values),
    )


def gather(items: Mapping[str, object], *, rank: int, world_size: int) -> Gathered:
    """Take some items apart, each on its own; raises what `capture` raises."""
    described_items = described(items)
    owners = own(items)
    found = [Gathering(item.name, rank=rank, world_size=world_size, per_rank=item.per_rank) for item in described_items]
    for item, into in zip(described_items, found, strict=True):
        content = unwrapped(items[item.name])
        try:
            if isinstance(content, nn.Module):
                _gather_module(into, owners)
            elif isinstance(content, Optimizer):
                gather_optimizer(content, into, owners)
            else:
                for leaf in leaves(tree_of(item, content)):
                    into.leaf(leaf)
        except values.Unsaveable as error:
            raise unsaveable(item.name, "a dictionary's key", error) from None
    return Gathered(items=tuple(described_items), found=tuple(found), owners=owners)


def _gather_module(into: Gathering, owners: Owners) -> None:
    for slot in owners.slots[into.item]:
        if isinstance(slot, Slot):
            into.tensor((slot.name,), slot.tensor, only_holder=slot.only_holder)
        else:
            for leaf in leaves({slot.name: slot.owner.get_extra_state()}):
                into.leaf(leaf)
