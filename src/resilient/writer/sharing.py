"""Which pieces of a save are stored already, by an earlier one, and where."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from resilient.catalog.references import refer
from resilient.format.chunks import Places
from resilient.format.documents import Object
from resilient.format.layout import Attempt
from resilient.policy.incremental import Base, unchanged
from resilient.store.base import Store
from resilient.writer.outline import Digests, Outline


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """Where a save has stored the pieces of this rank: the objects of its receipt, and a row for each of them."""

    objects: tuple[Object, ...]
    places: Places


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    """A committed save, and the objects that it keeps from being deleted."""

    attempt: Attempt
    keys: frozenset[str]


class Sharing:
    """Remembers the last full save that was committed, so that later ones may refer to it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._base: Base[Attempt, Stored] | None = None
        self._next: Base[Attempt, Stored] | None = None
        self._written: _Holder | None = None
        self._holder: _Holder | None = None
        self._promising = True

    def hopes(self, outline: Outline) -> bool:
        """Say whether the digests are worth waiting for, before anything is written.

        They cost a tenth of a write to a fast disk, unless they are made while it goes on. So they come first only
        where the last save, or there was none to tell, had much in common with the base.
        """
        return self._promising and self._base is not None and self._base.structure == outline.number

    def find(self, attempt: Attempt, outline: Outline, digests: Digests) -> npt.NDArray[np.bool_]:
        """Return which of the pieces of this rank ``attempt`` may refer to; once asked, deletion spares them."""
        mine = outline.mine
        same = unchanged(self._base, outline.number, digests[mine], outline.nbytes[mine])
        if same.any() and self._base is not None and not self._refer(self._base, attempt, same):
            self._base = None  # it was deleted, or this store cannot keep the promise
            return np.zeros(len(mine), bool)
        return same

    def _refer(self, base: Base[Attempt, Stored], attempt: Attempt, same: npt.NDArray[np.bool_]) -> bool:
        used = np.unique(base.places.places.object[same]).tolist()
        keys = {base.places.objects[each].key for each in used}
        # Retention gives the base up long before the saves that refer to it: then the last one of these vouches for it.
        holder = self._holder
        through = holder.attempt if holder is not None and keys <= holder.keys else None
        return refer(self._store, base.attempt, attempt, through)

    @property
    def stored(self) -> Stored:
        """Where the base lies; for what `find` has found."""
        assert self._base is not None, "find() has found something"
        return self._base.places

    def persisted(self, attempt: Attempt, outline: Outline, digests: Digests, stored: Stored, *, full: bool) -> None:
        """Take note of a save that is durable; ``full``: it refers to no other."""
        mine = digests[outline.mine]
        young = None if self._base is None else replace(self._base, saves=0)
        nbytes = outline.nbytes[outline.mine]
        self._promising = young is None or bool(unchanged(young, outline.number, mine, nbytes).any())
        self._base = None if self._base is None else self._base.aged()
        fresh = Base(attempt=attempt, structure=outline.number, digests=mine, places=stored)
        self._next = fresh if full else None
        self._written = _Holder(attempt=attempt, keys=frozenset(each.key for each in stored.objects))

    def committed(self, attempt: Attempt) -> None:
        """Take a full save as the base from now on, and any other as the one that holds what it refers to."""
        if self._written is not None and self._written.attempt == attempt:
            self._holder = self._written
        if self._next is not None and self._next.attempt == attempt:
            self._base, self._next = self._next, None
