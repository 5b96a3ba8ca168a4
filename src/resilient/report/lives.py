"""What the store knows of each generation of a run: who lived, what was written down, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Final, TypeVar

from resilient import events
from resilient.catalog.beat import Sign, read_sign
from resilient.catalog.evidence import explain_generation, in_writing, read_evidence, read_explanation
from resilient.catalog.generations import newest_number, read_base, read_claim
from resilient.catalog.hangs import read_hangs
from resilient.catalog.journals import Journal, read_journals
from resilient.catalog.line import Line
from resilient.catalog.outcomes import read_outcome
from resilient.catalog.parallel import each as of_each
from resilient.clock import Clock
from resilient.format import layout
from resilient.format.documents import Base, Claim, Commit, Outcome
from resilient.format.evidence import Evidence, Explanation
from resilient.format.hangs import Hang
from resilient.policy.failures.actions import Budgets
from resilient.policy.failures.rules import RULES
from resilient.report.clocks import corrected, offsets_of
from resilient.report.condensing import WANTED, condensed, most_reports
from resilient.report.model import End
from resilient.store.base import Store

E = TypeVar("E", bound=events.Event)

_SILENCE: Final = 6.0
"""Intervals without a sign of life after which nobody is taken to live any more."""

_LEAST_SILENCE_S: Final = 30.0

_STOP: Final = "stop"
"""Reason of the save with which all ranks stop together."""

_SAME_S: Final = 1.0
"""Between two measurements of when one process began: the kernel counts in ticks, and clocks are set."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """One generation. ``base`` is None if it has ended before it had anything to continue from."""

    claim: Claim
    base: Base | None
    journals: dict[int, Journal]
    sign: Sign | None
    outcome: Outcome | None = None
    evidence: tuple[Evidence, ...] = ()
    hangs: tuple[Hang, ...] = ()
    explanation: Explanation | None = None
    clocks: dict[int, float] = field(default_factory=dict)
    """By how many seconds the clocks of ranks were ahead, by rank; all times of ``journals`` are corrected."""
    stop: Commit | None = None
    """The save with which its ranks have stopped together, while it is kept."""
    newest: bool = False
    seen_now: float = field(default=0.0)
    """When this was read, in unix seconds."""

    @property
    def generation(self) -> int:
        return self.claim.generation

    @property
    def claimed_s(self) -> float:
        return _unix(self.claim.created)

    @property
    def began_s(self) -> float:
        """When its first process was started."""
        return min([self.claimed_s, *(each.header.process_began_s for each in self.journals.values())])

    @property
    def entered_s(self) -> float:
        """When its training function was about to be entered, by processes that have lived before it."""
        return min([self.claimed_s, *(each.header.began_s for each in self.journals.values())])

    @property
    def left_no_word(self) -> bool:
        """Whether nobody has said when or how it failed: all its processes were ended at once."""
        return not self.hangs and all(each.bystander for each in self.evidence)

    def shares_a_process_with(self, other: Life) -> bool:
        """Say whether one process has lived through both, as a program does that trains twice."""
        mine, theirs = (
            {(each.header.host, each.header.pid): each.header.process_began_s for each in life.journals.values()}
            for life in (self, other)
        )
        return any(abs(mine[one] - theirs[one]) < _SAME_S for one in mine.keys() & theirs.keys())

    @cached_property
    def end(self) -> End:
        """How it has ended, by what its ranks have said, else by who has fallen silent."""
        said = {event.how for rank in self.journals for event in self.told(events.Ended, rank)}
        stopped_s = self._stopped_s
        if stopped_s is not None:
            said.add("stopped")
        # After a stop whose step was saved nobody fails any more: workers that wait for their agent are killed by it.
        broke = [each for each in self.evidence if not each.bystander]
        broke = [each for each in broke if stopped_s is None or self._at_s(each) < stopped_s]
        failed = self.outcome is not None or bool(broke) or "failed" in said
        if not failed and said and said <= {"done", "stopped"}:
            return End.STOPPED if "stopped" in said else End.DONE
        if failed or not self.newest or self._hangs_to_the_end:
            return End.FAILED
        return End.RUNNING if self.alive else End.UNKNOWN

    @property
    def has_left_anything(self) -> bool:
        """Whether there is more of it than its claim; one that has only just begun counts as well."""
        told = self.journals or self.evidence or self.hangs or self.outcome is not None
        return bool(told) or (self.newest and self.alive)

    @property
    def alive(self) -> bool:
        """Whether there was a sign of life a moment ago."""
        if self.sign is None or self.sign.ended:
            return False
        return self.seen_now - _unix(self.sign.seen) < max(_LEAST_SILENCE_S, _SILENCE * self.sign.interval_s)

    @property
    def failed_s(self) -> float:
        """When its failure began, in unix seconds: on the rank that began it, if that is known."""
        hung = self.hung_since_s
        if hung is not None:
            return hung
        first = [each for each in self.evidence if not each.bystander]
        named = [each for each in first if self.explanation is not None and each.rank == self.explanation.rank]
        return min(map(self._at_s, named or first), default=self.last_word_s)

    @property
    def failed_step(self) -> int | None:
        """The last complete step by what was said of its failure; None if nobody has said."""
        ended = [event for rank in self.journals for event in self.told(events.Ended, rank) if event.how == "failed"]
        steps = [each.step for each in self.evidence if each.step is not None and not each.bystander]
        return max([*steps, *(event.step for event in ended)], default=None)

    @cached_property
    def last_word_s(self) -> float:
        """The newest sign of any of its ranks; none counts after they have parked, as they only wait to be ended."""
        if (parked_s := self._parked_s) is not None:
            return parked_s
        signs = [each.last_s for each in self.journals.values() if each.last_s]
        signs += map(self._at_s, self.evidence)
        signs += [_unix(each.created) - self.clocks.get(each.rank, 0.0) for each in self.hangs]
        if self.sign is not None and self._owns_sign:
            signs.append(_unix(self.sign.seen))
        return max(signs, default=self.claimed_s)

    @property
    def resumed_step(self) -> int | None:
        return None if self.base is None else self.base.step

    def told(self, kind: type[E], rank: int) -> list[E]:
        """Return the events of a kind that one rank has told."""
        return [each.event for each in self.journals[rank].records if isinstance(each.event, kind)]

    @property
    def _stopped_s(self) -> float | None:
        """When its ranks had stopped together, the step being saved.

        A worker that parks then is ended by its agent, often before it has written that down: the commit tells as well.
        """
        stops = [at_s for at_s, event in self._stops if event.error is None]
        return min([*stops, *([] if self.stop is None else [_unix(self.stop.created)])], default=None)

    @property
    def _parked_s(self) -> float | None:
        if self.end is not End.STOPPED:
            return None
        parked = [at_s for at_s, event in self._stops if event.kind == "resize"]
        if not any(self.told(events.Ended, rank) for rank in self.journals):
            parked += [] if self._stopped_s is None else [self._stopped_s]
        return max(parked, default=None)

    @cached_property
    def _stops(self) -> list[tuple[float, events.Stopped]]:
        records = [record for journal in self.journals.values() for record in journal.records]
        return [(each.at_s, each.event) for each in records if isinstance(each.event, events.Stopped)]

    def _at_s(self, evidence: Evidence) -> float:
        """Return when something was found, by the clock of the lowest rank."""
        if evidence.offset_s is not None:
            return evidence.wall_s + evidence.offset_s
        return evidence.wall_s - self.clocks.get(evidence.rank, 0.0)

    @property
    def _owns_sign(self) -> bool:
        # A launch that restarts its workers goes on with one sign of life for all their generations.
        return self.newest or not any(self.journals.values())

    @property
    def _hangs_to_the_end(self) -> bool:
        return self.hung_since_s is not None and not self.alive

    @cached_property
    def hung_since_s(self) -> float | None:
        """Since when it hangs, in unix seconds; None if it does not, or has gone on since."""
        if not self.hangs:
            return None
        last = max(
            (event.step for rank in self.journals for event in self.told(events.StepsTaken, rank)[-1:]),
            default=0,
        )
        if last > max(each.step for each in self.hangs) + 1:
            return None  # it has gone on since
        cause = None if self.explanation is None else self.explanation.rank
        some = next((each for each in self.hangs if each.rank == cause), None) or max(
            self.hangs, key=lambda each: each.age_s
        )
        return _unix(some.created) - some.age_s - self.clocks.get(some.rank, 0.0)


def read_lives(store: Store, line: Line, *, clock: Clock, machines: bool = True) -> list[Life]:
    """Return the generations of a run whose claim can be read, the oldest first; saves by hand are no lives.

    ``machines``: whether the samples of machines are read as well.

    Raises:
        StoreError: the store does not answer.
    """
    newest = newest_number(store)
    now_s = clock.now().timestamp()
    found = of_each(lambda each: read_claim(store, each), range(1, newest + 1))
    claims = [claim for claim in found if claim is not None and claim.heartbeat]
    most = most_reports(sum(claim.world_size for claim in claims))

    def keep(journal: Journal) -> Journal:
        return condensed(journal, most=most, lowest=journal.header.rank == 0)

    def journals(claim: Claim) -> dict[int, Journal]:
        number, nonce = claim.generation, claim.nonce
        return read_journals(store, number, nonce, of_others=WANTED, machines=machines, condensed=keep)

    return [_life(store, claim, line, journals(claim), newest=claim is claims[-1], now_s=now_s) for claim in claims]


def _life(store: Store, claim: Claim, line: Line, journals: dict[int, Journal], *, newest: bool, now_s: float) -> Life:
    number = claim.generation
    clocks = offsets_of(journals)

    return Life(
        claim=claim,
        base=read_base(store, number),
        journals={rank: corrected(each, clocks[rank]) if rank in clocks else each for rank, each in journals.items()},
        clocks=clocks,
        sign=read_sign(store, layout.heartbeat(claim.launch)),
        outcome=read_outcome(store, number),
        evidence=tuple(read_evidence(store, number)),
        hangs=read_hangs(store, number),
        explanation=_explanation(store, number, line),
        stop=next((each for each in line.commits if each.generation == number and each.reason == _STOP), None),
        newest=newest,
        seen_now=now_s,
    )


def _explanation(store: Store, generation: int, line: Line) -> Explanation | None:
    """Return what was concluded of a failure, or what is to be concluded now."""
    kept = read_explanation(store, generation)
    if kept is not None:
        return kept
    found = explain_generation(store, generation, line, rules=RULES, budgets=Budgets())
    return None if found is None else in_writing(found)


def _unix(created: str) -> float:
    return datetime.fromisoformat(created).timestamp()
