"""Which chunks of a save need not be sent again: a pure decision from digests and what was stored before."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

A = TypeVar("A")
P = TypeVar("P")

Digests = npt.NDArray[np.uint8]
"""One row of bytes for each chunk."""

REWRITE_EVERY: Final = 8
"""How many saves in a row may share one physical copy of a chunk: the last few checkpoints must not all be lost with
one damaged object."""

LEAST_SHARE: Final = 0.10
"""The share of the bytes that must be unchanged: for less, the objects that stay behind cost more than they save."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Base(Generic[A, P]):
    """The last full save of this rank, to which later ones refer: committed, and with all bytes stored by itself.

    A reference always names a base, and a base is a full save, so references never chain. ``structure`` names the list
    of chunks that ``digests`` and ``places`` (where they are stored) are about; ``saves`` counts those made since.
    """

    attempt: A
    structure: Hashable
    digests: Digests
    places: P
    saves: int = 0

    def aged(self) -> Base[A, P]:
        """Return the base after one more save, whether that one referred to it or not."""
        return replace(self, saves=self.saves + 1)


def unchanged(
    base: Base[A, P] | None, structure: Hashable, digests: Digests, nbytes: npt.NDArray[Any]
) -> npt.NDArray[np.bool_]:
    """Return which chunks need not be sent because the base has them; none of them: a full save is due.

    It is if there is no base or it is of another structure, if so many saves have shared its bytes, or if too little is
    unchanged to be worth it. Whoever makes it takes it as the next base once it is committed.

    Args:
        base: what this rank could refer to.
        structure: of the save to be made: the same chunks in the same order have the same name.
        digests: of all chunks that this rank stores.
        nbytes: of the bytes that they are of.
    """
    nothing = np.zeros(len(digests), bool)
    if base is None or base.structure != structure or base.saves + 1 >= REWRITE_EVERY:
        return nothing
    same: npt.NDArray[np.bool_] = (base.digests == digests).all(axis=1)
    return same if same.any() and nbytes[same].sum() >= LEAST_SHARE * nbytes.sum() else nothing
