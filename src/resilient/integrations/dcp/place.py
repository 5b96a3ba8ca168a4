"""The place that a writer or reader was given: opened when it is needed, and open again in another process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from resilient.errors import ErrorKind, UsageError
from resilient.store.base import Store
from resilient.store.open import open_store
from resilient.store.retrying import Retrying


class Place:
    """A URL, a path or a `Store`, with the options that reach it."""

    def __init__(self, place: str | os.PathLike[str] | Store, options: Mapping[str, Any] | None) -> None:
        self._place = place
        self._options = options
        self._opened: Retrying | None = None

    @property
    def store(self) -> Retrying:
        if self._opened is None:
            self._opened = open_store(self._place, storage_options=self._options)
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        # DCP sends writers to the process that saves for them, which opens the place by itself.
        recipe = self.store.recipe
        if recipe is None:
            raise UsageError(
                f"{self.store.url} exists in this process only, so no other process can save there",
                kind=ErrorKind.INVALID_ARGUMENT,
                hint="pass a URL or a path, or save with AsyncCheckpointerType.THREAD",
            )
        return {"_place": recipe.url, "_options": dict(recipe.options) or None, "_opened": None}
