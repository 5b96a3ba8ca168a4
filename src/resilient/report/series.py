"""What the journals of one life tell besides its time: saves, restores, pictures of steps, machines, notes, stakes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from resilient import events
from resilient.format.journal import Record
from resilient.observe.logs import in_words
from resilient.report.lives import Life
from resilient.report.model import MachineSeries, Note, PictureTime, RestoreTime, SaveTime, Stake

_LONGEST_GAP_S: Final = 600.0
"""Between samples of a machine, that is filled with nothing; after a longer one a new series begins."""

_NOTED: Final = (
    events.Demoted,
    events.FellBack,
    events.HangFound,
    events.HangOver,
    events.NumericFault,
    events.Refused,
    events.Reinstated,
    events.ReplicaDiffers,
    events.ShareMissed,
    events.StateUnchanged,
    events.StopAsked,
    events.Stopped,
    events.StragglerFound,
)


def saves_of(life: Life) -> Iterator[SaveTime]:
    """Yield the saves of a life, as its first rank saw them, in their order."""
    found: dict[int, SaveTime] = {}
    for record in _first(life):
        match record.event:
            case events.SaveStarted() as begun:
                found[begun.step] = SaveTime(
                    at_s=record.at_s - begun.stall_s,
                    generation=life.generation,
                    step=begun.step,
                    reason=begun.reason,
                    nbytes=begun.nbytes,
                    stall_s=begun.stall_s,
                )
            case (
                events.SaveFenced(step=step)
                | events.SavePersisted(step=step)
                | events.SaveCommitted(step=step)
                | events.SaveFailed(step=step)
            ) if step in found:
                found[step] = _with(found[step], record.event)
            case _:
                pass
    yield from found.values()


def restores_of(life: Life) -> Iterator[RestoreTime]:
    """Yield the restores of a life, as its first rank saw them."""
    sources: dict[int, tuple[tuple[str, int], ...]] = {}
    for record in _first(life):
        if isinstance(record.event, events.RestoredFromTiers):
            sources[record.event.step] = record.event.sources
    for record in _first(life):
        match record.event:
            case events.Restored() as restored:
                yield RestoreTime(
                    at_s=record.at_s - restored.duration_s,
                    generation=life.generation,
                    step=restored.step,
                    nbytes=restored.nbytes_read,
                    duration_s=restored.duration_s,
                    sources=sources.get(restored.step, (("the store", restored.nbytes_read),)),
                )
            case _:
                pass


def pictures_of(life: Life) -> Iterator[PictureTime]:
    """Yield what each rank's steps were spent on, in the order of time."""
    found = [
        PictureTime(
            at_s=record.at_s,
            generation=life.generation,
            rank=rank,
            step=event.step,
            step_s=event.step_s,
            compute_s=event.compute_s,
            exchange_s=event.exchange_s,
            data_s=event.data_s,
            optimizer_s=event.optimizer_s,
            save_s=event.save_s,
        )
        for rank, journal in life.journals.items()
        for record in journal.records
        if isinstance(event := record.event, events.StepPicture)
    ]
    yield from sorted(found, key=lambda each: each.at_s)


def machines_of(life: Life) -> Iterator[MachineSeries]:
    """Yield what each node did, samples that follow each other joined."""
    sampled = [
        record.event
        for journal in life.journals.values()
        for record in journal.records
        if isinstance(record.event, events.MachineSampled)
    ]
    open_: dict[str, _Growing] = {}
    for event in sorted(sampled, key=lambda each: each.began_s):
        before = open_.get(event.host)
        if before is not None and before.take(event):
            continue
        if before is not None:
            yield before.series(life.generation)
        open_[event.host] = _Growing(event)
    yield from (each.series(life.generation) for each in open_.values())


def notes_of(life: Life) -> Iterator[Note]:
    """Yield what is worth a mark, from all ranks; what rank 0 says for all, once."""
    for rank, journal in life.journals.items():
        for record in journal.records:
            if isinstance(record.event, _NOTED):
                kind = type(record.event).__name__
                yield Note(
                    at_s=record.at_s, generation=life.generation, rank=rank, kind=kind, message=in_words(record.event)
                )


def stakes_of(life: Life, newest: int | None, *, since: Callable[[int], float | None]) -> tuple[Stake, ...]:
    """Return what a lost process, node and job cost now; without tiers each costs what is not committed."""
    at_stake = [record.event for record in _first(life) if isinstance(record.event, events.AtStake)]

    def stake(what: str, step: int | None, source: str) -> Stake:
        if newest is not None and (step is None or step < newest):
            step, source = newest, "the store"
        return Stake(what=what, step=step, source=source, lost_s=None if step is None else since(step))

    store = events.AtStake(process_step=newest, process_source="the store", node_step=newest, node_source="the store")
    last = at_stake[-1] if at_stake else store
    return (
        stake("a process", last.process_step, last.process_source),
        stake("a node", last.node_step, last.node_source),
        stake("the job", newest, "the store"),
    )


def sentence_of(lives: Sequence[Life]) -> str:
    """Return the newest sentence that names the bottleneck; empty if nobody has looked."""
    for life in reversed(lives):
        for record in reversed(list(_first(life))):
            if isinstance(record.event, events.Bottleneck):
                return record.event.sentence
    return ""


def _first(life: Life) -> tuple[Record, ...]:
    return life.journals[min(life.journals)].records if life.journals else ()


def _with(save: SaveTime, event: events.Event) -> SaveTime:
    match event:
        case events.SaveFenced():
            return replace(save, stall_s=save.stall_s + event.waited_s)
        case events.SavePersisted():
            return replace(save, persist_s=event.duration_s, sent=event.sent, cpu_s=event.cpu_s)
        case events.SaveCommitted():
            return replace(save, commit_s=event.duration_s)
        case events.SaveFailed():
            return replace(save, error=event.error)
        case _:
            return save


class _Growing:
    """Samples of one machine that follow each other; lists, as there may be days of them."""

    def __init__(self, event: events.MachineSampled) -> None:
        self._first = event
        self._values = {name: list(values) for name, values in event.values}

    def take(self, event: events.MachineSampled) -> bool:
        """Append samples, after NaN for those that are missing; say False if they do not belong to these."""
        first, count = self._first, max(map(len, self._values.values()), default=0)
        if event.period_s != first.period_s or {name for name, _ in event.values} != set(self._values):
            return False
        missing = round((event.began_s - first.began_s) / first.period_s) - count
        if not -2 <= missing <= _LONGEST_GAP_S / first.period_s:
            return False
        for name, values in event.values:
            self._values[name] += [math.nan] * max(0, missing)
            self._values[name] += values
        return True

    def series(self, generation: int) -> MachineSeries:
        """Return all of them."""
        return MachineSeries(
            host=self._first.host,
            generation=generation,
            began_s=self._first.began_s,
            period_s=self._first.period_s,
            values={name: tuple(values) for name, values in self._values.items()},
        )
