"""Wrong clocks of nodes: found by what the ranks of one generation have done together, and corrected."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import Final

from resilient import events
from resilient.catalog.journals import Journal
from resilient.format.journal import Record

_LEAST_S: Final = 2.0
"""A difference below that is as likely one between ranks as one between clocks."""

_SPREAD: Final = 0.1
"""Of a difference, or half a second each way: a clock that is wrong is always wrong by the same."""


def offsets_of(journals: Mapping[int, Journal]) -> dict[int, float]:
    """Return by how many seconds the clocks of ranks are ahead of the lowest rank's; without those that are right.

    All ranks enter a generation, begin to train and complete each step together: the median of how far apart they say
    that this was is what their clocks differ by. Differences that vary, as of ranks that restore for longer, are no
    clock's.
    """
    if len(journals) < 2:
        return {}
    lowest = min(journals)
    reference = list(_told(journals[lowest]))
    found = {}
    for rank, journal in journals.items():
        entered_s = journal.header.began_s - journals[lowest].header.began_s
        apart = [entered_s, *_apart(reference, list(_told(journal)))]
        offset_s = median(apart)
        spread_s = median(abs(each - offset_s) for each in apart)
        if abs(offset_s) > _LEAST_S and spread_s <= max(0.5, _SPREAD * abs(offset_s)):
            found[rank] = offset_s
    return found


def corrected(journal: Journal, offset_s: float) -> Journal:
    """Return a journal as it would be if its clock had not been ahead."""
    header = journal.header
    return replace(
        journal,
        header=type(header)(
            **{name: getattr(header, name) for name in header.__struct_fields__}
            | {"process_began_s": header.process_began_s - offset_s, "began_s": header.began_s - offset_s}
        ),
        records=tuple(Record(each.at_s - offset_s, _event(each.event, offset_s)) for each in journal.records),
        last_s=journal.last_s - offset_s if journal.last_s else 0.0,
    )


def in_words(host: str, offset_s: float) -> str:
    """Return what was found of a host's clock."""
    return f"the clock of {host} is {abs(offset_s):.0f} s {'ahead' if offset_s > 0 else 'behind'}, corrected"


def _event(event: events.Event, offset_s: float) -> events.Event:
    match event:
        case events.StepsTaken(ended_s=ended_s) if ended_s:
            return replace(event, ended_s=ended_s - offset_s)
        case events.MachineSampled(began_s=began_s):
            return replace(event, began_s=began_s - offset_s)
        case _:
            return event


def _told(journal: Journal) -> Iterator[tuple[float, float]]:
    """Yield steps in rising order, each with the time at which it was complete; the first one is the beginning."""
    newest = -1.0
    for record in journal.records:
        match record.event:
            case events.GenerationStarted(resumed_step=resumed):
                step, at_s = float(resumed or 0), record.at_s
            case events.StepsTaken(step=taken, ended_s=ended_s):
                step, at_s = float(taken), ended_s or record.at_s
            case _:
                continue
        if step > newest:
            newest = step
            yield step, at_s


def _apart(reference: list[tuple[float, float]], own: list[tuple[float, float]]) -> Iterator[float]:
    """Yield how much later than the reference a rank says that a step was complete.

    Ranks report at different steps: between two reports of the reference its steps were made evenly.
    """
    steps = [step for step, _ in reference]
    for step, at_s in own:
        after = bisect_left(steps, step)
        if after == len(steps) or (after == 0 and steps[0] != step):
            continue
        late_step, late_s = reference[after]
        early_step, early_s = reference[after - 1] if late_step != step else (step - 1, late_s)
        yield at_s - (early_s + (late_s - early_s) * (step - early_step) / (late_step - early_step))
