"""How a nested container comes apart into named leaves, and how leaves become one again."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import msgspec
import torch

from resilient.errors import CorruptError, ErrorKind
from resilient.format import values
from resilient.format.documents import Key
from resilient.state.wrappers import Shard

Path: TypeAlias = tuple[Key, ...]

_MAX_DEPTH: Final = 100


class Leaf(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A tensor, a `Shard`, or the largest container (or other value) around it that has neither inside."""

    path: Path
    content: Any

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.content, torch.Tensor | Shard)


def leaves(root: Mapping[Any, Any], at: Path = ()) -> Iterator[Leaf]:
    """Yield the leaves of a dictionary, which is never a leaf itself, so that each of its entries has a name."""
    for key, child in root.items():
        path = (*at, key_of(key))
        if isinstance(child, torch.Tensor):  # of which there may be 100,000, and a generator costs more than the rest
            yield Leaf(path=path, content=child)
        else:
            yield from _leaves(child, path)


def _leaves(node: object, at: Path) -> Iterator[Leaf]:
    if isinstance(node, torch.Tensor | Shard) or not holds_tensor(node):
        yield Leaf(path=at, content=node)
    elif isinstance(node, dict):
        yield from leaves(node, at)
    else:
        assert isinstance(node, list | tuple)
        for index, child in enumerate(node):
            yield from _leaves(child, (*at, index if isinstance(node, list) else -1 - index))


def holds_tensor(node: object, depth: int = 0) -> bool:
    """Say whether a node is a tensor or has one somewhere inside."""
    if isinstance(node, torch.Tensor | Shard):
        return True
    if depth > _MAX_DEPTH:
        return False  # contains itself, or might as well: the codec refuses it by name
    if isinstance(node, dict):
        return any(holds_tensor(child, depth + 1) for child in node.values())
    return isinstance(node, list | tuple) and any(holds_tensor(child, depth + 1) for child in node)


def key_of(key: object) -> Key:
    """Return the stored form of a dictionary's key; raise `values.Unsaveable` if it has none."""
    return key if type(key) is str else (values.encode(key),)


def name_of(path: Path) -> str:
    """Return the dotted name of a path."""
    if len(path) == 1 and type(path[0]) is str:
        return path[0]  # of which there may be 100,000
    return ".".join(map(_part, path))


def _part(key: Key) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, int):
        return str(key if key >= 0 else -1 - key)
    return str(values.decode(key[0], opaque=True))


def build(found: Iterable[tuple[Path, Any]]) -> dict[Any, Any]:
    """Return the nested dictionary that has these leaves: what `leaves` took apart, in fresh containers.

    A leaf that is a dictionary may have further leaves below its path: they join its entries.
    """
    root: dict[Key, Any] = {}
    for path, content in found:
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Branch())
            if not isinstance(node, _Branch):
                raise _contradiction(path)
        node[path[-1]] = _joined(path, node.get(path[-1]), content)
    return {_raw(key): _closed(child) for key, child in root.items()}


class _Branch(dict[Key, Any]):
    """A container under construction, so that it is not mistaken for a leaf that is a dictionary."""


def _joined(path: Path, there: object, content: Any) -> Any:
    if type(content) is dict:
        branch = there if isinstance(there, _Branch) else _Branch()
        branch.update({key_of(key): value for key, value in content.items()})
        return branch
    if isinstance(there, _Branch):
        raise _contradiction(path)
    return content


def _contradiction(path: Path) -> CorruptError:
    return CorruptError(
        f"the checkpoint has something below {name_of(path)} or above it that is no container", kind=ErrorKind.MALFORMED
    )


def _closed(node: Any) -> Any:
    if not isinstance(node, _Branch):
        return node
    indices = sorted((key for key in node if isinstance(key, int)), key=abs)
    if not indices:
        return {_raw(key): _closed(child) for key, child in node.items()}
    children = [_closed(node[index]) for index in indices]
    return children if indices[-1] >= 0 else tuple(children)


def _raw(key: Key) -> object:
    return values.decode(key[0]) if isinstance(key, tuple) else key


def replaced(root: Any, new: Mapping[Path, Any]) -> Any:
    """Put new contents at some paths of a structure, in place, and return it; a tuple that changes is made anew.

    Dictionaries, lists and deques stay the objects that they are where the new contents have their type: the program
    may hold them under a name of its own.
    """
    return _Replacing(new).replaced(root, ())


class _Replacing:
    """One replacement; knows which containers are filled, as one that is in two places cannot have two contents."""

    def __init__(self, new: Mapping[Path, Any]) -> None:
        self._new = new
        self._filled: set[int] = set()

    def replaced(self, node: Any, at: Path) -> Any:
        if at in self._new:
            return self._fill(node, self._new[at])
        if isinstance(node, dict):
            for key in node:
                node[key] = self.replaced(node[key], (*at, key_of(key)))
        elif isinstance(node, list):
            node[:] = [self.replaced(child, (*at, i)) for i, child in enumerate(node)]
        elif isinstance(node, tuple):
            children = [self.replaced(child, (*at, -1 - i)) for i, child in enumerate(node)]
            if any(now is not before for now, before in zip(children, node, strict=True)):
                make = getattr(type(node), "_make", tuple)  # a named tuple is made by another constructor
                return make(children)
        return node

    def _fill(self, node: Any, content: Any) -> Any:
        if type(node) is not type(content) or id(node) in self._filled:
            return content
        if isinstance(node, dict):
            self._filled.add(id(node))
            entries = {key: self._fill(node[key], child) if key in node else child for key, child in content.items()}
            node.clear()
            for key, child in entries.items():
                node[key] = child  # not update(), which adds in a Counter
        elif isinstance(node, list | deque) and getattr(node, "maxlen", None) == getattr(content, "maxlen", None):
            self._filled.add(id(node))
            children = [self._fill(old, child) for old, child in zip(node, content, strict=False)]
            children += itertools.islice(content, len(children), None)
            node.clear()
            node.extend(children)
        else:
            return content
        return node
