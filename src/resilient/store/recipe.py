"""What another process needs in order to open the same store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The arguments of `resilient.store.open.open_store`, as values that any encoding carries.

    Credentials that the environment or a configuration file gives are not in it: the other process looks there too.
    """

    url: str
    options: Mapping[str, Any]


def described(url: str, options: Mapping[str, Any]) -> Recipe | None:
    """Return the recipe of a store, or None if an option is something that only this process has, such as a session."""
    return Recipe(url=url, options=dict(options)) if _is_plain(options) else None


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in {bool, int, float, str}
