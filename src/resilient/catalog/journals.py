"""What the ranks of a generation have written down, beside the checkpoints; and how long that stays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from resilient.catalog.generations import newest_number
from resilient.catalog.once import read_or_none
from resilient.catalog.parallel import each as of_each
from resilient.format import layout
from resilient.format.journal import Header, Record, Segment, decode_segment
from resilient.observe.journal import MACHINE
from resilient.store.base import Store

KEPT: Final = 256
"""Generations whose journals and records of failures stay; those before them are removed when a new one begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """One rank's, in the order of time. ``torn`` lines could not be read, ``absent`` segments are gone.

    ``last_s``: when the newest record was told, be it wanted or not, in unix seconds; 0 if there is none.
    """

    header: Header
    records: tuple[Record, ...]
    torn: int = 0
    absent: int = 0
    last_s: float = 0.0


def read_journals(
    store: Store,
    generation: int,
    nonce: str,
    *,
    of_others: Collection[str] | None = None,
    machines: bool = True,
    condensed: Callable[[Journal], Journal] = lambda journal: journal,
) -> dict[int, Journal]:
    """Return what the ranks of a generation have written down, by rank.

    Found by a listing, which may be stale: what is newest may be missing.

    Args:
        store: the run.
        generation: the number of that life.
        nonce: of its claim.
        of_others: the names of the events that are wanted of ranks other than the lowest; None: all.
        machines: whether samples of machines are read as well, which are most of what there is.
        condensed: called with each journal as it was read, for what is to be kept of it: a large job writes more down
            than a reader has memory.
    """
    keys = sorted(store.list(layout.journals(generation, nonce)))
    of_rank: dict[int, list[tuple[str, int, str]]] = {}
    for key in keys:
        named = layout.parse_journal(key)
        if named is not None and (machines or named[3] != MACHINE):
            of_rank.setdefault(named[2], []).append((named[3], named[4], key))
    lowest = min(of_rank, default=0)

    def read(rank: int) -> Journal | None:
        only = None if rank == lowest else of_others
        found = [(stream, number, _read(store, key, only)) for stream, number, key in of_rank[rank]]
        joined = _joined([(stream, number, segment) for stream, number, segment in found if segment is not None])
        return None if joined is None else condensed(joined)

    ranks = sorted(of_rank)
    return {rank: journal for rank, journal in zip(ranks, of_each(read, ranks), strict=True) if journal is not None}


def remove_old_records(store: Store, *, kept: int = KEPT) -> int:
    """Remove journals and records of failures and hangs of all but the newest generations; return how many.

    Nothing that a checkpoint needs is among them.
    """
    oldest = newest_number(store) - kept
    doomed: Iterable[str] = (
        key
        for prefix in (layout.JOURNALS, layout.EVIDENCE, layout.HANGS)
        for key in store.list(prefix)
        if (generation := _generation(key)) is not None and generation <= oldest
    )
    count = 0
    for key in doomed if oldest > 0 else ():
        store.delete(key)
        count += 1
    return count


def _generation(key: str) -> int | None:
    journal, hang = layout.parse_journal(key), layout.parse_hang(key)
    if journal is not None:
        return journal[0]
    return hang[0] if hang is not None else layout.parse_evidence(key)


def _read(store: Store, key: str, only: Collection[str] | None) -> Segment | None:
    data = read_or_none(store, key)
    return None if data is None else decode_segment(data, only=only)


def _joined(found: list[tuple[str, int, Segment]]) -> Journal | None:
    header = next((segment.header for _, _, segment in found if segment.header is not None), None)
    if header is None:
        return None
    streams: dict[str, list[int]] = {}
    for stream, number, _ in found:
        streams.setdefault(stream, []).append(number)
    return Journal(
        header=header,
        records=tuple(
            sorted((record for _, _, segment in found for record in segment.records), key=lambda each: each.at_s)
        ),
        torn=sum(segment.torn + (segment.header is None) for _, _, segment in found),
        last_s=max(segment.last_s for _, _, segment in found),
        absent=sum(max(numbers) + 1 - len(numbers) for stream, numbers in streams.items() if stream == "events"),
    )
