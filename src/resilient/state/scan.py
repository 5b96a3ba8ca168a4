"""What has to be the same for the leaves of an item to be the same: seen at about a microsecond per tensor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import attrgetter
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from resilient.format.documents import Item
from resilient.state.items import tree_of
from resilient.state.optimizers import split_group
from resilient.state.owners import Owners
from resilient.state.trees import holds_tensor, key_of
from resilient.state.wrappers import Shard

SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
"""Values that cannot change as long as they are the same object."""

_TENSORS: Final = frozenset({torch.Tensor, nn.Parameter})
_TEXT: Final = frozenset({str})

_parameters = attrgetter("_parameters")
_buffers = attrgetter("_buffers")
_children = attrgetter("_modules")
_transient = attrgetter("_non_persistent_buffers_set")


class DoubtfulError(Exception):
    """An item that may have other leaves for reasons that no scan would see. Callers capture it in full."""


@dataclass(slots=True, eq=False)
class Scan:
    """An item at a glance.

    ``shape`` compares equal to that of an earlier scan if the leaves have the same names; ``tensors`` and ``values``
    are what `capture` takes now, in its order, looked at by the caller.
    """

    shape: list[object] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    values: list[object] = field(default_factory=list)

    def mapping(self, node: Mapping[Any, Any]) -> None:
        """Take a container that is never a leaf itself."""
        keys = tuple(node)
        self.shape.append(keys if _TEXT.issuperset(map(type, keys)) else tuple(map(key_of, keys)))
        children = list(node.values())
        if _TENSORS.issuperset(map(type, children)):
            self.shape.append(Tensor)
            self.tensors += children
        else:
            for child in children:
                self.node(child)

    def mappings(self, nodes: Sequence[dict[Any, Any]]) -> None:
        """Take many containers that are never leaves themselves, all at once if they have nothing but tensors."""
        keys = list(chain.from_iterable(nodes))
        children = list(_contents(nodes))
        if _TEXT.issuperset(map(type, keys)) and _TENSORS.issuperset(map(type, children)):
            self.shape += (list(map(len, nodes)), keys)
            self.tensors += children
        else:
            for node in nodes:
                self.mapping(node)

    def node(self, node: object) -> None:
        """Take a tensor, a value, or a container that may be a leaf."""
        if type(node) in SCALARS:
            self.shape.append(None)
            self.values.append(node)
        elif isinstance(node, Tensor):
            self.shape.append(Tensor)
            self.tensors.append(node)
        elif isinstance(node, Shard):
            self.shape.append((node.name, node.global_shape, node.box))
            self.tensors.append(node.tensor)
        elif not holds_tensor(node):
            self.shape.append(None)
            self.values.append(node)
        elif isinstance(node, dict):
            self.shape.append(dict)
            self.mapping(node)
        else:
            assert isinstance(node, list | tuple)
            self.shape.append((isinstance(node, list), len(node)))
            for child in node:
                self.node(child)


Scanner: TypeAlias = Callable[[], Scan]


def scanner_of(item: Item, content: Any, owners: Owners) -> Scanner:
    """Return what scans an item from now on.

    Raises:
        DoubtfulError: its leaves may change in ways that a scan does not see.
    """
    if item.kind == "module":
        return _ModuleScanner(content)
    if item.kind == "optimizer":
        return _OptimizerScanner(item.name, content, owners)

    def scan() -> Scan:
        found = Scan()
        found.mapping(tree_of(item, content))
        return found

    return scan


class _ModuleScanner:
    """Remembers the submodules, so that looking whether they are still there needs no walk."""

    def __init__(self, root: nn.Module) -> None:
        self._modules = list(_walk(root))
        for module in self._modules:
            _refuse_doubtful(module)
        self._sharded = [each for each in self._modules if isinstance(each, FSDPModule)]
        self._parallel = [each for each in self._modules if isinstance(each, DistributedDataParallel)]
        self._hiding = [each for each in self._modules if _overrides(each, "_save_to_state_dict")]
        self._segments = _segments(self._modules)

    def __call__(self) -> Scan:
        for module in self._sharded:
            module.reshard()
        parameters, buffers = list(map(_parameters, self._modules)), list(map(_buffers, self._modules))
        children = list(map(_children, self._modules))
        found = Scan()
        found.shape = [
            list(map(type, self._modules)),
            *(_keys(each) for each in (parameters, buffers, children)),
            list(map(id, _contents(children))),
            # The objects, as optimizers know parameters by what they are. Buffers may be made anew in every step.
            list(map(id, _contents(parameters))),
            [content is None for content in _contents(buffers)],
            list(map(frozenset, map(_transient, self._modules))),
            [(each.broadcast_buffers, *map(id, each.modules_buffers)) for each in self._parallel],
            [_saved_by(each) for each in self._hiding],
        ]
        dicts = list(chain.from_iterable(zip(parameters, buffers, strict=True)))
        for where, kept, asked in self._segments:
            found.tensors += (each for each in compress(_contents(dicts[where]), kept) if each is not None)
            if asked is not None:
                found.mapping({"_extra_state": asked.get_extra_state()})
        return found


class _OptimizerScanner:
    """Remembers the names of the parameters, which hold as long as they and the modules stay what they are."""

    def __init__(self, item: str, optimizer: Optimizer, owners: Owners) -> None:
        self._optimizer = optimizer
        self._names: list[list[str]] = []
        for group in optimizer.param_groups:
            if not all(isinstance(each, nn.Parameter) for each in group["params"]):
                raise DoubtfulError  # a buffer, of which modules' scans do not say which object it is
            self._names.append([owners.names(item, each)[0] for each in group["params"]])

    def __call__(self) -> Scan:
        found = Scan()
        groups = self._optimizer.param_groups
        found.shape.append(len(groups))
        for names, group in zip(self._names, groups, strict=False):
            plain, tensors = split_group(group)
            found.shape.append(list(map(id, group["params"])))
            found.values.append({"params": names, **plain})
            found.mapping(tensors)
        by_key = cast("Mapping[object, Any]", self._optimizer.state)
        parameters = [id(key) if isinstance(key, Tensor) else None for key in by_key]
        found.shape.append(parameters)
        if None not in parameters and set(map(type, by_key.values())) == {dict}:
            found.mappings(list(by_key.values()))
        else:
            for key, state in by_key.items():
                found.mapping(state if isinstance(key, Tensor) else {key: state})
        return found


_Segment: TypeAlias = tuple[slice, list[bool], nn.Module | None]
"""Which of the dictionaries, which of their contents are saved, and who is asked for more after them."""


def _segments(modules: Sequence[nn.Module]) -> list[_Segment]:
    found: list[_Segment] = []
    start = 0
    kept: list[bool] = []
    for at, module in enumerate(modules):
        kept += [content is not None for content in _parameters(module).values()]
        transient = _transient(module)
        kept += [content is not None and name not in transient for name, content in _buffers(module).items()]
        is_asked = _overrides(module, "get_extra_state")
        if is_asked or at == len(modules) - 1:
            found.append((slice(start, 2 * at + 2), kept, module if is_asked else None))
            start, kept = 2 * at + 2, []
    return found


def _walk(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in _children(module).values():
        if child is not None:
            yield from _walk(child)


def _refuse_doubtful(module: nn.Module) -> None:
    names = ("named_parameters", "named_buffers", "_named_members")
    kinds = {type(contents) for contents in (_parameters(module), _buffers(module), _children(module))}
    if any(_overrides(module, name) for name in names) or not kinds <= {dict, OrderedDict}:
        raise DoubtfulError


def _overrides(module: nn.Module, method: str) -> bool:
    return getattr(type(module), method) is not getattr(nn.Module, method) or method in module.__dict__


def _saved_by(module: nn.Module) -> tuple[str, ...]:
    saved: dict[str, Any] = {}
    module._save_to_state_dict(saved, "", True)  # noqa: SLF001 -- the hook for subclasses
    return tuple(saved)


def _keys(dicts: Sequence[dict[str, Any]]) -> tuple[list[int], list[str]]:
    return list(map(len, dicts)), list(chain.from_iterable(dicts))


def _contents(dicts: Sequence[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(each.values() for each in dicts)
