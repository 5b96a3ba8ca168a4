"""Where the ranks of a generation stood when the job hung: kept beside its checkpoints, for all nodes to read."""

from __future__ import annotations

from collections.abc import Container

from resilient.catalog.once import read_or_none
from resilient.catalog.parallel import each as of_each
from resilient.errors import CorruptError
from resilient.format import layout
from resilient.format.hangs import Hang, decode_hang, encode_hang
from resilient.store.base import Store


def keep_hang(store: Store, hang: Hang) -> None:
    """Keep where a rank stands; of a generation that hangs again, the last time.

    Raises:
        StoreError: it could not be stored.
    """
    store.put(layout.hang(hang.generation, hang.rank), [encode_hang(hang)])


def remove_hang(store: Store, hang: Hang) -> None:
    """Take back where a rank stood: it has gone on since.

    Raises:
        StoreError: it could not be removed.
    """
    store.delete(layout.hang(hang.generation, hang.rank))


def read_hangs(store: Store, generation: int, *, but: Container[int] = ()) -> tuple[Hang, ...]:
    """Return where the ranks of a generation stood, by rank; none, if it has not hung. Damaged ones are passed over.

    ``but``: ranks that are not looked for. By a listing, which may be stale.
    """
    listed = (layout.parse_hang(key) for key in store.list(layout.HANGS))
    ranks = sorted(found[1] for found in listed if found is not None and found[0] == generation)
    found = of_each(
        lambda rank: _read(store, layout.hang(generation, rank)), [each for each in ranks if each not in but]
    )
    return tuple(each for each in found if each is not None and each.generation == generation)


def _read(store: Store, key: str) -> Hang | None:
    data = read_or_none(store, key)
    try:
        return None if data is None else decode_hang(data, key)
    except CorruptError:
        return None
