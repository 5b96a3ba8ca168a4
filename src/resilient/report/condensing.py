"""What an account keeps of a journal: a job of a thousand ranks writes more down than its reader has memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from resilient import events
from resilient.catalog.journals import Journal
from resilient.format.journal import Record, name_of

_MOST: Final = 400_000
"""Reports of steps, and as many pictures of steps, of all ranks and generations together."""

_LEAST: Final = 16

WANTED: Final = frozenset(
    name_of(kind)
    for kind in (
        events.GenerationStarted,
        events.RestoreStarted,
        events.Restored,
        events.StepsTaken,
        events.StepPicture,
        events.SaveStarted,
        events.Ended,
        events.MachineSampled,
        events.FellBack,
        events.HangFound,
        events.HangOver,
        events.NumericFault,
        events.Stopped,
    )
)
"""What an account wants of ranks other than the lowest, which tells the rest for all."""

_LAST_SAVES: Final = frozenset({"end", "stop"})


def most_reports(ranks: int) -> int:
    """Return how many reports of steps of each rank are kept, where there are so many ranks in all generations."""
    return max(_LEAST, _MOST // max(1, ranks))


def condensed(journal: Journal, *, most: int, lowest: bool) -> Journal:
    """Return a journal with ``most`` reports of steps at most, neighbors added up, and as many pictures.

    ``lowest``: of the rank that tells what all have in common; of the others saves are left out, but for the last one.
    """
    records = journal.records
    if not lowest:
        records = tuple(each for each in records if not _is_of_a_save(each.event))
    taken = [each for each in records if isinstance(each.event, events.StepsTaken)]
    pictures = [each for each in records if isinstance(each.event, events.StepPicture)]
    if len(taken) > most or len(pictures) > most:
        rest = [each for each in records if not isinstance(each.event, events.StepsTaken | events.StepPicture)]
        stride = -(-len(pictures) // most) if pictures else 1
        records = tuple(sorted([*rest, *_added_up(taken, most), *pictures[::stride]], key=lambda each: each.at_s))
    return replace(journal, records=records)


def _is_of_a_save(event: events.Event) -> bool:
    return isinstance(event, events.SaveStarted) and event.reason not in _LAST_SAVES


def _added_up(taken: Sequence[Record], most: int) -> list[Record]:
    """Return fewer reports that say the same; the first one, which has the first step in it, stays as it is."""
    size = -(-len(taken) // most)
    rest = taken[1:]
    groups = [rest[start : start + size] for start in range(0, len(rest), size)]
    return [*taken[:1], *map(_sum, groups)]


def _sum(group: Sequence[Record]) -> Record:
    last = group[-1]
    found = [each.event for each in group if isinstance(each.event, events.StepsTaken)]
    assert isinstance(last.event, events.StepsTaken), "what is grouped"
    event = replace(
        last.event,
        steps=sum(each.steps for each in found),
        turn_s=sum(each.turn_s for each in found),
        data_s=sum(each.data_s for each in found),
        save_s=sum(each.save_s for each in found),
    )
    return Record(last.at_s, event)
