"""Which data objects of a deleted attempt others still need."""

from __future__ import annotations

from collections.abc import Iterable

from resilient.catalog.commit import read_commit
from resilient.catalog.contents import open_manifest
from resilient.catalog.once import exists
from resilient.catalog.references import referrers
from resilient.errors import CorruptError
from resilient.format import layout
from resilient.format.layout import Attempt
from resilient.store.base import Store


def shared(store: Store, base: Attempt) -> frozenset[str] | None:
    """Return the data objects of ``base`` to which attempts refer that count, or may come to count; None for all.

    Only exact once ``base`` has its TOMBSTONE: from then on nobody begins to refer to it. An attempt that referred
    holds what it needs until it is gone itself: whether it is on the line, or will be, need not be known.
    """
    keys: set[str] = set()
    # One after another, as `referrers` asks for: a later one may have relied on an earlier one's hold.
    for by in referrers(store, base):
        held = None if by is None else _held_by(store, by)
        if held is None:
            return None
        keys |= {key for key in held if layout.parse_data(key) == base}
    return frozenset(keys)


def _held_by(store: Store, by: Attempt) -> Iterable[str] | None:
    """Return the objects that an attempt needs; None if it may need any."""
    if not exists(store, by.commit):
        # Without a TOMBSTONE it may still be committed, however long its writer stalls. With one it never counts.
        return () if exists(store, by.tombstone) else None
    # Also with a TOMBSTONE, until its COMMIT is removed: it may be being read, like what it stored itself.
    commit = read_commit(store, by)
    try:
        return None if commit is None else [each.key for each in open_manifest(store, commit).objects]
    except CorruptError:
        return None
