"""Match saved items with what they are loaded into: everything is checked before anything is touched."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from resilient.catalog.contents import Contents
from resilient.errors import ErrorKind, UsageError
from resilient.format import values
from resilient.format.documents import Item
from resilient.state.collector import nothing_collected
from resilient.state.gathering import unsaveable
from resilient.state.items import described, own, tree_of, unwrapped
from resilient.state.matching import NOTHING, Matching
from resilient.state.modules import Slot
from resilient.state.optimizer_matching import OptimizerMatching
from resilient.state.owners import Owners
from resilient.state.plan import Loading, Plan, Target, mismatch, unexpected_line
from resilient.state.rng import Rng
from resilient.state.stateful_matching import match_extra_state, match_stateful
from resilient.state.tensors import dtype_of
from resilient.state.trees import leaves, name_of, replaced


def prepare(
    items: Mapping[str, object],
    manifest: Contents,
    *,
    rank: int,
    world_size: int,
    strict: bool = True,
    whole: bool = False,
    notices: list[str],
) -> Loading:
    """Return a load of some items of a checkpoint: which bytes go where, and what is left to do after.

    Args:
        items: the destinations, by the names under which they were saved.
        manifest: what was saved.
        rank: the global rank of this process.
        world_size: how many processes load together.
        strict: False accepts names that only one side has.
        whole: everything in the checkpoint must be wanted; else items that are not named are left alone.
        notices: gets one line for everything that a person should know, such as parameters that were frozen when saved.

    Raises:
        UsageError: all that is missing, unexpected, or of another shape or dtype, in one error (kind ``mismatch``), and
            nothing was changed; or what `capture` would raise for these items.
    """
    described_items = described(items)
    if not items:
        raise UsageError(
            "nothing was asked to be loaded", kind=ErrorKind.INVALID_ARGUMENT, hint="name at least one item"
        )
    loader = _Loader(own(items), manifest, rank=rank, world_size=world_size, strict=strict, notices=notices)
    with nothing_collected():
        for item in described_items:
            try:
                loader.match(item, unwrapped(items[item.name]))
            except values.Unsaveable as error:
                raise unsaveable(item.name, "a dictionary's key", error) from None
    if whole:
        loader.plan.unexpected += [f"{item.name} (all of it)" for item in manifest.items if item.name not in items]
    return loader.plan.check(manifest.attempt.step, strict=strict, alone=world_size == 1, notices=notices)


class _Loader:
    """Matches item after item, into one plan."""

    def __init__(
        self, owners: Owners, manifest: Contents, *, rank: int, world_size: int, strict: bool, notices: list[str]
    ) -> None:
        self.plan = Plan()
        self._owners = owners
        self._manifest = manifest
        self._rank = rank
        self._world_size = world_size
        self._strict = strict
        self._notices = notices
        self._saved = {item.name: item for item in manifest.items}

    def match(self, item: Item, content: Any) -> None:
        """Plan to load one item, or note why that cannot be."""
        if item.name not in self._saved:
            self.plan.missing.append(f"{item.name} (the checkpoint has {', '.join(self._saved) or 'no items'})")
            return
        if not self._is_for_us(item, self._saved[item.name]):
            return
        saved_rank = self._rank if item.per_rank else None
        if item.derived and self._rank >= self._manifest.world_size:
            saved_rank = 0
        match = Matching(item.name, self._manifest, saved_rank, self.plan, self._notices)
        if isinstance(content, nn.Module):
            self._match_module(match)
        elif isinstance(content, Optimizer):
            parameters = frozenset(f"{each.item}.{each.name}" for each in self._manifest.tensors)
            OptimizerMatching(content, match, self._owners, parameters).plan()
        elif isinstance(content, Rng):
            self._match_rng(content, match, derive=saved_rank != self._rank)
        elif item.kind == "mapping":
            self._match_mapping(content, match)
        else:
            match_stateful(content, tree_of(item, content), match)
        match.close()

    def _is_for_us(self, item: Item, saved: Item) -> bool:
        """Say whether this rank can take over what was saved of an item; if not, note it."""
        if (item.per_rank, item.derived) != (saved.per_rank, saved.derived):
            self.plan.different.append(f"{item.name}: saved {_manner(saved)}, wanted {_manner(item)}")
            return False
        ranks = self._manifest.world_size
        if not item.per_rank or item.derived or ranks == self._world_size:
            return True
        # The state of a rank that is gone would be lost, and a new rank would start fresh: neither without being asked.
        line = (
            f"{item.name}: saved by {ranks} ranks, each its own state; {self._world_size} ranks cannot take that over"
        )
        if self._strict or self._rank >= ranks:
            self.plan.different.append(f"{line} (restart on {ranks} ranks, or leave the item out)")
            return False
        self._notices.append(f"{line}: rank {self._rank} takes that of rank {self._rank}")
        return True

    def _match_module(self, match: Matching) -> None:
        slots = self._owners.slots[match.item]
        match.want((slot.name, slot.tensor) for slot in slots if isinstance(slot, Slot))
        for slot in slots:
            if not isinstance(slot, Slot):
                match_extra_state(slot, match)

    def _match_mapping(self, root: dict[Any, Any], match: Matching) -> None:
        found = list(leaves(root))
        others = [leaf for leaf in found if not isinstance(leaf.content, torch.Tensor)]
        match.want([(name_of(leaf.path), leaf.content) for leaf in found if isinstance(leaf.content, torch.Tensor)])
        match.want([(leaf.content.name, leaf.content) for leaf in others if leaf.is_tensor])
        new = {leaf.path: match.want_value(name_of(leaf.path), leaf.path) for leaf in others if not leaf.is_tensor}
        new = {path: value for path, value in new.items() if value is not NOTHING}
        if new:
            self.plan.installs.append(lambda: replaced(root, new))

    def _match_rng(self, rng: Rng, match: Matching, *, derive: bool) -> None:
        snapshot = match.rebuild((), lambda _, saved: torch.empty(saved.shape, dtype=dtype_of(saved.dtype)))
        set_up = rng.derive if derive else rng.restore
        self.plan.last.append(functools.partial(set_up, snapshot, step=self._manifest.attempt.step, rank=self._rank))


def _manner(item: Item) -> str:
    if item.derived:
        return "as random state"
    return "per rank" if item.per_rank else "as one state of all ranks"


__all__ = ["Loading", "Target", "mismatch", "prepare", "unexpected_line"]
