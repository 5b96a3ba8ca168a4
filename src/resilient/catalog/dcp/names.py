"""Which item and which name an entry of a DCP state dictionary has here, and the way back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from resilient.format import values
from resilient.format.documents import Key

ROOT: Final = "state_dict"
"""The item of the entries that lie in no dictionary of their own: ``{"step": 3}``, or a bare ``model.state_dict()``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """Where an entry is: ``path`` leads to it inside the item."""

    item: str
    name: str
    path: tuple[Key, ...]


def name_of(fqn: str, path: object = None) -> Name:
    """Return the place of an entry, given its dotted name and, if it is known, the path that DCP flattened.

    ``{"model": {"layer.weight": ...}}`` is ``layer.weight`` of the item ``model``. What is in no dictionary, or is not
    known to be in one, belongs to `ROOT` under its whole name.
    """
    keys = tuple(path) if isinstance(path, tuple | list) else ()
    known = all(type(key) is str or (type(key) is int and key >= 0) for key in keys)
    if not known or ".".join(map(str, keys)) != fqn:
        return Name(item=ROOT, name=fqn, path=(fqn,))
    item, *rest = keys
    if not rest or not isinstance(item, str) or not item or item == ROOT:
        return Name(item=ROOT, name=fqn, path=keys)
    return Name(item=item, name=".".join(map(str, rest)), path=tuple(rest))


def fqn_of(item: str, name: str, rank: int | None = None) -> str:
    """Return the dotted name by which DCP asks for something; that of one rank's own says so."""
    whose = "" if rank is None else f"rank{rank}."
    return f"{whose}{name}" if item == ROOT else f"{item}.{whose}{name}"


def path_of(item: str, path: tuple[Key, ...], rank: int | None = None) -> tuple[str | int, ...]:
    """Return the path by which DCP builds a nested dictionary: text, and numbers for the elements of lists."""
    whose = () if rank is None else (f"rank{rank}",)
    return (*(() if item == ROOT else (item,)), *whose, *map(_dcp_key, path))


def _dcp_key(key: Key) -> str | int:
    if isinstance(key, str):
        return key
    if isinstance(key, int):
        return key if key >= 0 else -1 - key
    return str(values.decode(key[0], opaque=True))


def entries(value: object, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], object]]:
    """Yield the entries that DCP makes of a value: it takes dictionaries apart, and lists that have some inside."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from entries(child, (*path, str(key)))
    elif isinstance(value, list) and _is_taken_apart(value):
        for index, child in enumerate(value):
            yield from entries(child, (*path, index))
    else:
        yield path, value


def _is_taken_apart(node: object) -> bool:
    if isinstance(node, Mapping):
        return True
    return isinstance(node, list) and any(_is_taken_apart(child) for child in node)
