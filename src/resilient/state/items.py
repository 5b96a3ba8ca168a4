"""What kind of thing an item is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from resilient.errors import ErrorKind, UsageError
from resilient.format.documents import Item
from resilient.state.modules import ready
from resilient.state.owners import Owners
from resilient.state.rng import Rng
from resilient.state.trees import leaves
from resilient.state.wrappers import AfterStep, PerRank, Shard


def own(items: Mapping[str, object]) -> Owners:
    """Make the modules among some items ready, and return who owns which parameter."""
    modules = {name: inner for name, value in items.items() if isinstance(inner := unwrapped(value), nn.Module)}
    for name, module in modules.items():
        ready(name, module)
    return Owners(modules)


def described(items: object) -> list[Item]:
    """Return how items are described, in order; raise `UsageError` if they are no items by name, or one is none."""
    if not isinstance(items, Mapping):
        raise UsageError(
            f"items by name are wanted, not a {type(items).__qualname__}",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint='give it a name of your choice, as in {"model": model}',
        )
    return [item_of(name, value) for name, value in items.items()]


def item_of(name: object, value: object) -> Item:
    """Return how an item is described; raise `UsageError` if it is nothing that can be saved."""
    if not isinstance(name, str) or not name:
        raise UsageError(
            f"an item is called {name!r}", kind=ErrorKind.INVALID_ARGUMENT, hint="an item's name is a text"
        )
    inner = unwrapped(value)
    if isinstance(inner, Rng):
        return Item(name, "rng", per_rank=True, derived=True)
    per_rank = declared(value, PerRank)
    if isinstance(inner, nn.Module):
        return Item(name, "module", per_rank)
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(inner).__mro__):
        # By name: importing it is slow. Its ``state`` is empty, the real one is inside.
        raise UsageError(
            f"{name} is a ZeroRedundancyOptimizer, whose state is spread over ranks in its own way",
            kind=ErrorKind.UNSAVEABLE,
            hint="shard with torch.distributed.fsdp.fully_shard instead",
        )
    if isinstance(inner, Optimizer):
        return Item(name, "optimizer", per_rank)
    if isinstance(inner, dict):
        return Item(name, "mapping", per_rank)
    if callable(getattr(inner, "state_dict", None)) and callable(getattr(inner, "load_state_dict", None)):
        return Item(name, "stateful", per_rank)
    raise UsageError(
        f"{name} is a {type(inner).__qualname__} ({type(inner).__module__}), which cannot be saved",
        kind=ErrorKind.UNSAVEABLE,
        hint="an item is a module, an optimizer, a dictionary, or has state_dict and load_state_dict",
    )


def unwrapped(value: object) -> object:
    """Return what `PerRank` and `AfterStep` wrap, or the value itself."""
    while isinstance(value, PerRank | AfterStep):
        value = value.value
    return value


def declared(value: object, wrapper: type[PerRank[Any] | AfterStep[Any]]) -> bool:
    """Say whether an item is wrapped in this, at whatever depth."""
    while isinstance(value, PerRank | AfterStep):
        if isinstance(value, wrapper):
            return True
        value = value.value
    return False


def tree_of(item: Item, content: Any) -> dict[Any, Any]:
    """Return the dictionary that is the state of an item that is neither a module nor an optimizer.

    Raises:
        UsageError: a ``state_dict()`` that is no dictionary, or has a `Shard`, which its owner could not take back.
    """
    if isinstance(content, Rng):
        return content.state
    if item.kind == "mapping":
        assert isinstance(content, dict)
        return content
    state = content.state_dict()
    what = f"{item.name}: {type(content).__qualname__}.state_dict()"
    if not isinstance(state, dict):
        raise UsageError(f"{what} is a {type(state).__qualname__}, not a dictionary", kind=ErrorKind.UNSAVEABLE)
    if any(isinstance(leaf.content, Shard) for leaf in leaves(state)):
        raise UsageError(f"{what} has a Shard", kind=ErrorKind.UNSAVEABLE, hint="pass Shards in a plain dictionary")
    return state
