"""Whether training changes anything: the digests of one save against those of the one before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resilient.writer.outline import Digests, Outline


class Freshness:
    """Remembers what this rank has stored of the last save that became durable."""

    def __init__(self) -> None:
        self._structure: int | None = None
        self._digests: Digests | None = None

    def look(self, outline: Outline, digests: Digests, trained: Sequence[int]) -> bool | None:
        """Say whether any element that this rank stores of these tensors has changed since the save before.

        None: there is nothing to compare: no save before, one of another structure, or nothing of these tensors.
        """
        mine = outline.mine
        before, known = self._digests, self._structure == outline.number
        self._structure, self._digests = outline.number, digests[mine]
        if before is None or not known or not trained:
            return None
        of_them = np.isin(outline.tensor[mine], np.asarray(trained, np.int64))
        return bool((before[of_them] != self._digests[of_them]).any()) if of_them.any() else None
