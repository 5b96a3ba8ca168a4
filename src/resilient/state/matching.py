"""One item's destination against what was saved of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, Final

import torch

from resilient.catalog.contents import Contents
from resilient.format import values
from resilient.format.documents import Tensor
from resilient.state.plan import Plan
from resilient.state.trees import Path, build
from resilient.state.wrappers import Shard

NOTHING: Final = object()
_INDEXED: Final = 2
"""How many keys of a path are indexed: ``state`` and a parameter's name, for thousands of parameters."""


class Matching:
    """The stored leaves of one item, as one rank sees them; whatever is not taken in the end was unexpected."""

    def __init__(self, item: str, manifest: Contents, rank: int | None, plan: Plan, notices: list[str]) -> None:
        self.item = item
        self.plan = plan
        self.notices = notices
        self.tensors = {each.name: each for each in manifest.tensors if each.item == item and each.rank == rank}
        self.values = {each.name: each for each in manifest.values if each.item == item and each.rank == rank}
        self._untaken = {*self.tensors, *self.values}

    def want(self, wanted: Iterable[tuple[str, torch.Tensor | Shard]]) -> None:
        """Plan to fill tensors; one that is there under several names (tied weights) is filled once."""
        rest = pairs = list(wanted)
        if len({id(into) for _, into in pairs}) == len(pairs):
            rest = self.plan.fill_alike(self.tensors, pairs)
            self.plan.num_wanted += len(pairs) - len(rest)
            left = {name for name, _ in rest}
            self._untaken.difference_update([name for name, _ in pairs if name not in left])
        by_identity: dict[int, tuple[torch.Tensor | Shard, list[str]]] = {}
        for name, into in rest:
            if id(into) in by_identity:
                by_identity[id(into)][1].append(name)
            else:
                by_identity[id(into)] = into, [name]
        self.plan.num_wanted += len(by_identity)
        for into, names in by_identity.values():
            self._want(into, names)

    def want_value(self, name: str, path: Path) -> Any:
        """Return a stored value, or `NOTHING` and note that."""
        if name in self.values:
            self._untaken.discard(name)
            return values.decode(self.values[name].data)
        # DCP stores the entries of a nested dictionary one by one, though nothing in it is a tensor.
        inside = [each for each in self.values.values() if each.path[: len(path)] == path]
        if inside and not any(each.path[: len(path)] == path for each in self.tensors.values()):
            self._untaken.difference_update(each.name for each in inside)
            (whole,) = build((each.path[len(path) - 1 :], values.decode(each.data)) for each in inside).values()
            return whole
        self._miss(name, "a value")
        return NOTHING

    def rebuild(self, at: Path, like: Callable[[Path, Tensor], torch.Tensor]) -> Any:
        """Return what was saved at and below a path, in fresh containers, or `NOTHING`.

        ``like`` returns the tensor that a stored one is read into. Names that shared a tensor share it again.
        """
        assert len(at) <= _INDEXED
        depth = max(len(at) - 1, 0)
        found: list[tuple[Path, Any]] = []
        shared: dict[str, torch.Tensor] = {}
        for name in self._below.get(at, ()):
            self._untaken.discard(name)
            if name in self.values:
                found.append((self.values[name].path[depth:], values.decode(self.values[name].data)))
                continue
            path, source = self.tensors[name].path, self.source(name)
            if source.name not in shared:
                shared[source.name] = like(path, source)
                self.plan.fill(self.item, name, source, shared[source.name])
            found.append((path[depth:], shared[source.name]))
        root = build(found)
        return root if not at else next(iter(root.values()), NOTHING)

    def paths(self) -> Iterator[tuple[str, Path]]:
        """Yield the name and the path of each stored leaf."""
        yield from ((name, each.path) for name, each in self.tensors.items())
        yield from ((name, each.path) for name, each in self.values.items())

    def source(self, name: str) -> Tensor:
        """Return the stored tensor that has the bytes of a name."""
        saved = self.tensors[name]
        return saved if saved.alias is None else self.tensors[saved.alias]

    def peek(self, name: str) -> Any:
        """Return a stored value without taking it."""
        return values.decode(self.values[name].data)

    def has(self, at: Path) -> bool:
        """Say whether anything was saved at or below a path."""
        return at in self._below

    def accept(self, at: Path) -> None:
        """Say that what was saved at and below a path is accounted for, although nothing reads it."""
        self._untaken.difference_update(self._below.get(at, ()))

    def close(self) -> None:
        """Report what was saved and nothing wanted."""
        order = [*self.tensors, *self.values]
        self.plan.unexpected += [f"{self.item}.{name}" for name in order if name in self._untaken]

    @cached_property
    def _below(self) -> dict[Path, list[str]]:
        found: dict[Path, list[str]] = {}
        for name, path in self.paths():
            for length in range(min(len(path), _INDEXED) + 1):
                found.setdefault(path[:length], []).append(name)
        return found

    def _want(self, into: torch.Tensor | Shard, names: list[str]) -> None:
        present = [name for name in names if name in self.tensors]
        if not present:
            self._miss(names[0], "a tensor")
            return
        if len(present) > 1 and len({self.source(name).name for name in present}) > 1:
            line = f"{', '.join(present)} were separate tensors when saved and are one here: {present[0]} is used"
            self.notices.append(f"{self.item}: {line}")
        self._untaken.difference_update(names)
        self.plan.fill(self.item, present[0], self.source(present[0]), into)

    def _miss(self, name: str, wanted: str) -> None:
        if name in self._untaken:
            self._untaken.discard(name)
            saved = "a tensor" if name in self.tensors else "a value"
            self.plan.different.append(f"{self.item}.{name}: saved as {saved}, wanted as {wanted}")
        else:
            self.plan.missing.append(f"{self.item}.{name}")
