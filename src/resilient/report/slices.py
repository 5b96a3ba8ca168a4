"""One life of one rank, cut into slices of time without gaps: what each was spent on, and which steps it made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from resilient import events
from resilient.catalog.journals import Journal
from resilient.format.journal import Record
from resilient.report.model import PRODUCTIVE, Part, Parts

_LAST_SAVES = frozenset({"end", "stop"})
"""Reasons of saves that training waits for, as it is over."""

_BEGUN: Final = 0.999
"""Of a step at most, that was begun and not completed."""

_QUIET: Final = 10.0
"""Times as long as reports of steps are apart, a job that lives may be busy outside of its loop; or as long as this:"""

_QUIET_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Slice:
    """``parts`` sum to ``end_s - begin_s``; the steps after ``from_step`` up to ``to_step`` were made, evenly."""

    begin_s: float
    end_s: float
    parts: Parts
    from_step: float = 0.0
    to_step: float = 0.0

    def beyond(self, step: float) -> float:
        """Return which share of its steps lie beyond a step; 0 if it made none."""
        made = self.to_step - self.from_step
        return min(1.0, max(0.0, (self.to_step - step) / made)) if made > 0 else 0.0


def life_of(
    journal: Journal, *, until_s: float, failed: bool = True, known_step: int | None = None, hung: bool = False
) -> tuple[Slice, ...]:
    """Return the life of a rank from the start of its process until then, when it has ``failed`` or was last seen.

    What comes after the last report of steps counts as more of the same, for as long as such reports were apart: a rank
    that failed had made steps at its pace, which it could not tell any more. Beyond that nobody knows of any progress:
    a job that lives may be busy outside of its loop, though not for ever, and one that has failed stood still before
    anybody noticed.

    Args:
        journal: what the rank has told.
        until_s: when it failed or was last seen, unix seconds.
        failed: whether it failed then.
        known_step: the last complete step by what was said of its failure: it has made no more than that. Where that is
            the last one reported as well, it was busy outside of its loop, unless it
        hung: which is known.
    """
    cutting = _Cutting(journal, until_s)
    for record in journal.records:
        cutting.take(record)
    if failed:
        cutting.fail(known_step, hung=hung)
    else:
        cutting.go_on()
    return tuple(cutting.slices)


def sum_of(slices: Iterable[Slice]) -> dict[Part, float]:
    """Return the seconds of some slices, by part."""
    total: dict[Part, float] = {}
    for each in slices:
        for part, seconds in each.parts.items():
            total[part] = total.get(part, 0.0) + seconds
    return total


def lost_of(slices: Iterable[Slice], kept_step: float) -> dict[Part, float]:
    """Return the seconds that made steps beyond the one that was kept, by the part which they were."""
    total: dict[Part, float] = {}
    for each in slices:
        share = each.beyond(kept_step)
        for part, seconds in each.parts.items() if share else ():
            if part in PRODUCTIVE:
                total[part] = total.get(part, 0.0) + share * seconds
    return total


def time_of(slices: Sequence[Slice], step: float) -> float | None:
    """Return when a step was complete, in unix seconds; None if it was not made here."""
    for each in slices:
        if each.from_step < step <= each.to_step:
            return each.end_s - each.beyond(step) * (each.end_s - each.begin_s)
    return None


def reached_s(journal: Journal, step: int) -> float:
    """Return when a step that is beyond the last report was complete, at the usual pace; 0 if there is no report."""
    taken = [each for each in journal.records if isinstance(each.event, events.StepsTaken)]
    if not taken or not isinstance(last := taken[-1].event, events.StepsTaken):
        return 0.0
    return (last.ended_s or taken[-1].at_s) + max(0, step - last.step) * _usual_step_s(journal)


class _Cutting:
    """Cuts one slice after another; ``at_s`` and ``step`` are where the last one ended."""

    def __init__(self, journal: Journal, until_s: float) -> None:
        self.slices: list[Slice] = []
        self.until_s = until_s
        self.at_s = min(journal.header.process_began_s, until_s)
        self.step = 0.0
        self.turns = 0
        self.ending = self.restoring = False
        self._usual_s = _usual_step_s(journal)
        self._apart_s = _apart_s(journal)
        self._waiting = _exchange_share(journal)
        self._pace: dict[Part, float] = {}

    def take(self, record: Record) -> None:
        """Cut off what a record tells of."""
        match record.event:
            case events.GenerationStarted(resumed_step=resumed):
                self.step = float(resumed or 0)
            case events.Restored(duration_s=duration_s):
                self._rest_until(record.at_s - duration_s)
                self._cut(record.at_s, {Part.RESTORE: math.inf})
                self.restoring = False
            case events.RestoreStarted():
                self._rest_until(record.at_s)
                self.restoring = True
            case events.StepsTaken() as taken:
                self._steps(taken, taken.ended_s or record.at_s)
            case events.SaveStarted(reason=reason, stall_s=stall_s) if reason in _LAST_SAVES:
                self._rest_until(record.at_s - stall_s)
                self.ending = True
            case events.Ended(step=step):
                if step > self.step and self._pace:  # the turn in which the loop was left
                    self._cut(record.at_s, self._pace, float(step))
                self._rest_until(record.at_s)
                self.ending = True
            case _:
                pass

    def go_on(self) -> None:
        """Cut off the rest of a rank that lives: it will tell of the steps that it makes."""
        if self._tells_no_more:
            self._rest_until(self.until_s)
            return
        quiet_until_s = self.at_s + max(_QUIET_S, _QUIET * self._apart_s)
        self._more_of_the_same(min(self.until_s - self.at_s, self._apart_s), 0.0)
        self._cut(quiet_until_s, {Part.OUTSIDE: math.inf})
        self._cut(self.until_s, {Part.DETECTION: math.inf})

    def fail(self, known_step: int | None, *, hung: bool) -> None:
        """Cut off the rest of a rank that failed: it has made steps that it could not tell of."""
        if self._tells_no_more:
            self._rest_until(self.until_s)
            return
        silent_s = self.until_s - self.at_s
        if known_step is not None and known_step <= self.step:
            # Within a step, or in an evaluation after it: which one can be told only if that took long.
            left_s = min(silent_s, self._usual_s) if silent_s <= self._apart_s or hung else 0.0
            self._more_of_the_same(left_s, min(_BEGUN, left_s / self._usual_s))
            self._cut(self.until_s, {Part.DETECTION if hung else Part.OUTSIDE: math.inf})
            return
        known = 0.0 if known_step is None else known_step - self.step
        left_s = min(silent_s, max(self._apart_s, (known + _BEGUN) * self._usual_s))
        steps = left_s / self._usual_s
        self._more_of_the_same(left_s, steps if known_step is None else min(known + _BEGUN, max(known, steps)))
        self._cut(self.until_s, {Part.DETECTION: math.inf})

    @property
    def _tells_no_more(self) -> bool:
        return not self.turns or self.ending or self._usual_s <= 0

    def _more_of_the_same(self, duration_s: float, steps: float) -> None:
        pace = sum(self._pace.values())
        parts = {part: duration_s * seconds / pace for part, seconds in self._pace.items()} if pace else {}
        self._cut(self.at_s + duration_s, parts or {Part.COMPUTE: math.inf}, self.step + steps)

    def _steps(self, taken: events.StepsTaken, ended_s: float) -> None:
        first = not self.turns
        if first:
            self._rest_until(ended_s - taken.turn_s - taken.save_s)
        self.turns += taken.steps
        spent_s = max(0.0, min(ended_s, self.until_s) - self.at_s)
        save_s = min(taken.save_s, spent_s)
        turn_s = min(taken.turn_s, spent_s - save_s)
        # The first steps compile, allocate and connect: what they take beyond the usual is part of the start.
        excess_s = max(0.0, turn_s - taken.steps * self._usual_s) if first and self._usual_s else 0.0
        data_s = min(taken.data_s, turn_s - excess_s)
        work_s = turn_s - excess_s - data_s
        parts = {
            Part.SAVE: save_s,
            Part.START: excess_s,
            Part.DATA: data_s,
            Part.EXCHANGE: self._waiting * work_s,
            Part.COMPUTE: (1 - self._waiting) * work_s,
            Part.OUTSIDE: spent_s - save_s - turn_s,
        }
        if not first or not excess_s:
            self._pace = parts
        self._cut(ended_s, parts, float(taken.step))

    def _rest_until(self, at_s: float) -> None:
        """What nothing tells of: before the first step a start, after the last one the end of it all."""
        part = Part.SAVE if self.ending else Part.OUTSIDE
        if not self.turns:
            part = Part.RESTORE if self.restoring else Part.START
        self._cut(at_s, {part: math.inf})

    def _cut(self, end_s: float, parts: Parts, to_step: float | None = None) -> None:
        """Cut a slice off; a part of infinity gets all of it."""
        end_s = min(max(end_s, self.at_s), self.until_s)
        duration_s = end_s - self.at_s
        to_step = self.step if to_step is None else to_step
        if duration_s > 0:
            known = {part: min(seconds, duration_s) for part, seconds in parts.items() if seconds > 0}
            known = known or {Part.OUTSIDE: duration_s}
            scale = duration_s / sum(known.values())
            scaled = {part: scale * seconds for part, seconds in known.items()}
            self.slices.append(Slice(self.at_s, end_s, scaled, min(self.step, to_step), to_step))
        self.at_s, self.step = end_s, to_step


def _usual_step_s(journal: Journal) -> float:
    """Return how long a step usually takes, from the later reports if there are any; 0 if nobody has said."""
    taken = [each.event for each in journal.records if isinstance(each.event, events.StepsTaken)]
    found = [each.turn_s / each.steps for each in taken[1:] or taken if each.steps]
    return median(found) if found else 0.0


def _apart_s(journal: Journal) -> float:
    """Return how far apart reports of steps may be: half as long again as the longest time between two."""
    told = [(each.event, each.at_s) for each in journal.records if isinstance(each.event, events.StepsTaken)]
    ended = [event.ended_s or at_s for event, at_s in told]
    apart = [later - earlier for earlier, later in pairwise(ended)] or [event.turn_s for event, _ in told]
    return 1.5 * max(apart, default=0.0) + 2 * _usual_step_s(journal)


def _exchange_share(journal: Journal) -> float:
    """Return the share of a step without its wait for data that is waiting for the exchange, by the newest pictures."""
    shares = [
        each.event.exchange_s / busy_s
        for each in journal.records
        if isinstance(each.event, events.StepPicture) and (busy_s := _busy_s(each.event)) > 0
    ]
    return min(1.0, max(0.0, median(shares))) if shares else 0.0


def _busy_s(picture: events.StepPicture) -> float:
    return picture.compute_s + picture.exchange_s + picture.optimizer_s
