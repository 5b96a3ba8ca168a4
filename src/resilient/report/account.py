"""The account of a run, from its store alone: what its time was spent on, and what each failure cost.

Every instant belongs to one part. Within a generation each rank's life is cut into slices, and their mean over the
ranks counts; between generations the launcher re-forms the group, or nobody runs anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Final

from resilient.catalog.line import Line, read_line
from resilient.catalog.run_info import read_info
from resilient.clock import Clock
from resilient.errors import ErrorKind, NotFoundError
from resilient.report.clocks import in_words
from resilient.report.lives import Life, read_lives
from resilient.report.model import (
    PRODUCTIVE,
    End,
    GenerationTime,
    Incident,
    Ledger,
    Part,
    Parts,
    Promise,
    ettr_of,
)
from resilient.report.series import machines_of, notes_of, pictures_of, restores_of, saves_of, sentence_of, stakes_of
from resilient.report.slices import Slice, life_of, lost_of, reached_s, sum_of, time_of
from resilient.store.base import Store

_POINTS: Final = 240
"""Of the curve of the sliding hour."""

_HOUR_S: Final = 3600.0

_REMEDIES: Final = {
    Part.LOST: "save more often, or keep copies of the state on other nodes (tiers, peer_copies)",
    Part.DETECTION: 'let hangs end their rank (on_hang="restart"), or lower hang_after_s',
    Part.REFORMATION: "keep spare nodes, and let the agent restart workers (resilient run, --rdzv-backend=resilient)",
    Part.IDLE: "have the job requeued as soon as it ends",
    Part.START: "look at what the program does before its first step: imports, data, compilation caches",
    Part.RESTORE: "keep the state in tiers of the nodes (tiers), or use a faster store",
    Part.SAVE: 'save less often, or let every="auto" choose',
}


def read_ledger(store: Store, *, clock: Clock, machines: bool = True) -> Ledger:
    """Return the account of a run up to its newest sign of life.

    It begins with the first life that has left any word: what there was before, by hand or by an older version of this
    package, has told nobody where its time went.

    Args:
        store: the run.
        clock: tells whether the run is still alive.
        machines: whether to read the samples of machines, which are most of what there is and change no other figure.

    Raises:
        NotFoundError: nothing has begun here, or nothing that keeps an account.
        StoreError: the store does not answer.
    """
    info = read_info(store)
    line = read_line(store)
    lives = read_lives(store, line, clock=clock, machines=machines)
    if info is None:
        raise _nothing(store, "no run has begun here", "name the place of a run, or its URL")
    told = list(dropwhile(lambda life: not life.has_left_anything, lives))
    if not told:
        why = "nothing here keeps an account: it was saved by hand, or by an older version of this package"
        raise _nothing(store, why, f"`resilient ls {store.url}` lists its checkpoints; `resilient.train` keeps one")
    return _Account(told, unaccounted=len(lives) - len(told)).ledger(store, info.run_id, line)


def _nothing(store: Store, why: str, hint: str) -> NotFoundError:
    return NotFoundError(f"{store.url}: {why}", kind=ErrorKind.NO_CHECKPOINT, hint=hint)


@dataclass(slots=True)
class _Lived:
    """A generation with its time: from ``began_s`` over ``failed_s`` (when it was last at work) to ``ended_s``."""

    life: Life
    began_s: float
    failed_s: float
    ended_s: float
    slices: dict[int, tuple[Slice, ...]]
    kept_step: float = math.inf
    lost: dict[int, dict[Part, float]] = field(default_factory=dict)
    """By the generation after whose failure somebody went back: what was lost of this one then."""

    @property
    def last_step(self) -> int:
        known = [each.to_step for slices in self.slices.values() for each in slices[-1:]]
        evident = [each.step for each in self.life.evidence if each.step is not None]
        stopped = [] if self.life.stop is None else [self.life.stop.step]
        return int(max([*known, *evident, *stopped, self.life.resumed_step or 0]))

    @property
    def made_steps(self) -> bool:
        return any(each.to_step > each.from_step for slices in self.slices.values() for each in slices)

    @property
    def detection_s(self) -> float:
        return self.ended_s - self.failed_s

    def parts(self) -> dict[Part, float]:
        """Return the time of all ranks, their mean; it sums to ``ended_s - began_s``."""
        total = self._mean(sum_of)
        if not self.slices:
            total = {Part.START: self.failed_s - self.began_s}
        for lost in self.lost.values():
            for part, seconds in lost.items():
                total[part] -= seconds
                total[Part.LOST] = total.get(Part.LOST, 0.0) + seconds
        if self.detection_s > 0:
            total[Part.DETECTION] = total.get(Part.DETECTION, 0.0) + self.detection_s
        return {part: seconds for part, seconds in total.items() if seconds > 1e-9}

    def lose(self, kept_step: float, by: int) -> dict[Part, float]:
        """Lose the steps beyond one, unless they are lost already; return the seconds, by what they were."""
        if kept_step >= self.kept_step:
            return {}
        before_step, self.kept_step = self.kept_step, kept_step
        after = self._mean(lambda slices: lost_of(slices, kept_step))
        before = self._mean(lambda slices: lost_of(slices, before_step))
        lost = {part: seconds - before.get(part, 0.0) for part, seconds in after.items()}
        earlier = self.lost.get(by, {})
        self.lost[by] = {part: earlier.get(part, 0.0) + lost.get(part, 0.0) for part in earlier.keys() | lost.keys()}
        return lost

    def _mean(self, of: Callable[[Sequence[Slice]], Parts]) -> dict[Part, float]:
        total: dict[Part, float] = {}
        for slices in self.slices.values():
            for part, seconds in of(slices).items():
                total[part] = total.get(part, 0.0) + seconds / len(self.slices)
        return total


class _Account:
    """Puts the lives of a run in order, and their time together."""

    def __init__(self, lives: Sequence[Life], *, unaccounted: int = 0) -> None:
        self._unaccounted = unaccounted
        self._lived: list[_Lived] = []
        for number, life in enumerate(lives):
            after = lives[number + 1 :]
            self._lived.append(_lived(life, after, self._lived[-1] if self._lived else None))
        self._losses = self._lose()

    def ledger(self, store: Store, run_id: str, line: Line) -> Ledger:
        """Return all of it."""
        lives = [each.life for each in self._lived]
        parts: dict[Part, float] = {}
        for piece in [*(each.parts() for each in self._lived), *(gap for _, gap in self._gaps())]:
            for part, seconds in piece.items():
                parts[part] = parts.get(part, 0.0) + seconds
        last = self._lived[-1]
        newest = line.commits[0].step if line.commits else None
        stakes = stakes_of(lives[-1], newest, since=self._since)
        return Ledger(
            url=store.url,
            run_id=run_id,
            began_s=self._lived[0].began_s,
            as_of_s=last.ended_s,
            step=max(last.last_step, newest or 0),
            parts=parts,
            generations=tuple(map(_generation, self._lived)),
            incidents=tuple(self._incidents()),
            saves=tuple(save for life in lives for save in saves_of(life)),
            restores=tuple(restore for life in lives for restore in restores_of(life)),
            pictures=tuple(picture for life in lives for picture in pictures_of(life)),
            machines=tuple(series for life in lives for series in machines_of(life)),
            stakes=stakes if last.life.end is not End.DONE else (),
            notes=tuple(note for life in lives for note in notes_of(life)),
            ettr_hours=self._hours(),
            bottleneck=sentence_of(lives),
            promise=_promise(lives[-1], parts),
            missing=tuple(self._missing()),
        )

    def _lose(self) -> dict[int, float]:
        """Take from earlier lives what later ones went back behind; return the seconds by the life that failed then."""
        losses: dict[int, float] = {}
        for number, lived in enumerate(self._lived):
            if number == 0 or lived.life.base is None:
                continue
            kept = float(lived.life.base.step or 0)
            by = self._failed_before(number)
            lost = [sum(each.lose(kept, by).values()) for each in self._lived[:number]]
            losses[by] = losses.get(by, 0.0) + sum(lost)
        return losses

    def _failed_before(self, number: int) -> int:
        """Return the life whose failure has cost the steps which one went back behind: the newest that made any.

        One that failed before its first step has lost none.
        """
        made = next((each for each in reversed(range(number)) if self._lived[each].made_steps), number - 1)
        return made if self._lived[made].life.end is End.FAILED else number - 1

    def _gaps(self) -> Iterator[tuple[int, Parts]]:
        """Yield the time between two lives, with the number of the earlier one."""
        for number, (before, after) in enumerate(zip(self._lived, self._lived[1:], strict=False)):
            goes_on = before.life.claim.launch == after.life.claim.launch
            yield number, {Part.REFORMATION if goes_on else Part.IDLE: after.began_s - before.ended_s}

    def _incidents(self) -> Iterator[Incident]:
        gaps = dict(self._gaps())
        for number, lived in enumerate(self._lived):
            life = lived.life
            if life.end is not End.FAILED:
                continue
            after = self._lived[number + 1] if number + 1 < len(self._lived) else None
            parts = {Part.LOST: self._losses.get(number, 0.0), Part.DETECTION: lived.parts().get(Part.DETECTION, 0.0)}
            parts |= gaps.get(number, {})
            if after is not None:
                spent = after.parts()
                parts |= {part: spent.get(part, 0.0) for part in (Part.START, Part.RESTORE)}
            said = life.explanation
            based = next((each.life for each in self._lived[number + 1 :] if each.life.base is not None), None)
            resumed = None if based is None else based.resumed_step
            yield Incident(
                at_s=lived.failed_s,
                generation=life.generation,
                failure="unknown" if said is None else said.failure,
                confidence="unknown" if said is None else said.confidence,
                rank=None if said is None else said.rank,
                node=None if said is None else said.node,
                why="it has left no word" if said is None else said.why,
                proof=() if said is None else said.proof,
                action="" if said is None else said.action,
                because="" if said is None else said.because,
                last_step=lived.last_step,
                resumed_step=resumed,
                lost_steps=max(0, lived.last_step - (resumed or 0)) if based is not None else 0,
                parts={part: seconds for part, seconds in parts.items() if seconds > 0},
                sources=next((each.sources for each in restores_of(based)), ()) if based is not None else (),
            )

    def _since(self, step: int) -> float | None:
        """Return for how long a step has been complete; None if nobody has made it, or it was lost since."""
        for lived in reversed(self._lived):
            for slices in list(lived.slices.values())[:1]:
                at_s = time_of(slices, step)
                if at_s is not None:
                    return self._lived[-1].ended_s - at_s
            if step == (lived.life.resumed_step or 0):
                return self._lived[-1].ended_s - lived.began_s
        return None

    def _hours(self) -> tuple[tuple[float, float], ...]:
        """Return the ETTR of the hour before each of some points, as the first rank of each life tells it."""
        steps = [piece for lived in self._lived for piece in _productive(lived)]
        began_s, ended_s = self._lived[0].began_s, self._lived[-1].ended_s
        count = min(_POINTS, max(1, int((ended_s - began_s) / 10)))
        found = []
        for number in range(1, count + 1):
            at_s = began_s + number * (ended_s - began_s) / count
            from_s = max(began_s, at_s - _HOUR_S)
            productive_s = sum(share * max(0.0, min(end, at_s) - max(begin, from_s)) for begin, end, share in steps)
            found.append((at_s, min(1.0, productive_s / (at_s - from_s)) if at_s > from_s else 0.0))
        return tuple(found)

    def _missing(self) -> Iterator[str]:
        if self._unaccounted:
            yield f"{self._unaccounted} generations before the first one that has left any word"
        yield from dict.fromkeys(
            in_words(each.life.journals[rank].header.host, offset_s)
            for each in self._lived
            for rank, offset_s in each.life.clocks.items()
        )
        for lived in self._lived:
            life, number = lived.life, lived.life.generation
            if not life.journals:
                yield f"generation {number} has written no journal: all of its time counts as start-up"
                continue
            silent = life.claim.world_size - len(life.journals)
            if silent:
                yield f"generation {number}: {silent} of {life.claim.world_size} ranks have written no journal"
            torn = sum(each.torn for each in life.journals.values())
            if torn:
                yield f"generation {number}: {torn} lines of its journals cannot be read"
            absent = sum(each.absent for each in life.journals.values())
            if absent:
                yield f"generation {number}: {absent} segments of its journals were removed, for they had become many"


def _lived(life: Life, later: Sequence[Life], before: _Lived | None) -> _Lived:
    """Return a life with its time; it begins no earlier than the one before has ended, and ends before the next one."""
    began_s = life.began_s
    if before is not None:
        began_s = life.entered_s if life.shares_a_process_with(before.life) else began_s
        began_s = max(began_s, before.ended_s)
    failed = life.end is End.FAILED
    hung = life.hung_since_s is not None and life.end in {End.FAILED, End.RUNNING}
    failed_s = life.failed_s if failed or hung else life.last_word_s
    based = next((each for each in later if each.base is not None), None)
    if life.left_no_word and based is not None and failed:
        failed_s = max(failed_s, _made_s(life, based))
    ended_s = max(life.last_word_s, failed_s, began_s)
    if later:
        begins_s = later[0].entered_s if later[0].shares_a_process_with(life) else later[0].began_s
        ended_s = max(began_s, min(ended_s, begins_s))
    failed_s = min(max(failed_s, began_s), ended_s) if failed or hung else ended_s
    slices = {
        rank: _from(
            life_of(each, until_s=failed_s, failed=failed, known_step=life.failed_step if failed else None, hung=hung),
            began_s,
            failed_s,
        )
        for rank, each in life.journals.items()
    }
    return _Lived(life, began_s, failed_s, ended_s, slices)


def _made_s(life: Life, after: Life) -> float:
    """Return when the step was complete, at the usual pace, from which the next life has gone on: it lived so long."""
    base = after.base
    if base is None or base.step is None or base.base_generation != life.generation:
        return 0.0
    return max((reached_s(journal, base.step) for journal in life.journals.values()), default=0.0)


def _from(slices: Sequence[Slice], began_s: float, until_s: float) -> tuple[Slice, ...]:
    """Return slices that begin when the generation does: a rank whose process came later has not begun before that."""
    found = [each for each in slices if each.end_s > began_s]
    if not found:
        return (Slice(began_s, until_s, {Part.START: until_s - began_s}),) if until_s > began_s else ()
    first = found[0]
    if first.begin_s > began_s:
        return (Slice(began_s, first.begin_s, {Part.START: first.begin_s - began_s}), *found)
    share = (first.end_s - began_s) / (first.end_s - first.begin_s)
    parts = {part: share * seconds for part, seconds in first.parts.items()}
    return (Slice(began_s, first.end_s, parts, first.from_step, first.to_step), *found[1:])


def _generation(lived: _Lived) -> GenerationTime:
    life = lived.life
    return GenerationTime(
        generation=life.generation,
        nonce=life.claim.nonce,
        world_size=life.claim.world_size,
        hosts=tuple(dict.fromkeys(each.header.host for each in life.journals.values())) or (life.claim.host,),
        began_s=lived.began_s,
        ended_s=lived.ended_s,
        resumed_step=life.resumed_step,
        last_step=lived.last_step,
        kept_step=None if lived.kept_step == math.inf else int(lived.kept_step),
        end=life.end,
        parts=lived.parts(),
    )


def _productive(lived: _Lived) -> Iterator[tuple[float, float, float]]:
    """Yield begin, end and productive share of each slice of the first rank."""
    for slices in list(lived.slices.values())[:1]:
        for each in slices:
            kept = 1 - each.beyond(lived.kept_step)
            useful_s = sum(seconds for part, seconds in each.parts.items() if part in PRODUCTIVE)
            yield each.begin_s, each.end_s, kept * useful_s / (each.end_s - each.begin_s)


def _promise(newest: Life, parts: Parts) -> Promise | None:
    promised = next((each.header.sla for each in newest.journals.values() if each.header.sla is not None), None)
    if promised is None:
        return None
    delivered = ettr_of(parts)
    badput = {part: seconds for part, seconds in parts.items() if part not in PRODUCTIVE and seconds > 0}
    largest = max(badput, key=lambda part: badput[part], default=None)
    message = f"{100 * delivered:.1f} % of the time were productive, {100 * promised:.1f} % are promised"
    if delivered < promised and largest is not None:
        share = 100 * badput[largest] / sum(parts.values())
        message += f"; the most of the rest is {largest} ({share:.1f} %): {_REMEDIES[largest]}"
    return Promise(promised=promised, delivered=delivered, largest=largest, message=message)
