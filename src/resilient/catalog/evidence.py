"""What the ranks of a generation have left of its failure, and what follows from that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from resilient.catalog.generations import read_base, read_claim
from resilient.catalog.hangs import read_hangs
from resilient.catalog.line import Line
from resilient.catalog.once import create_once, read_or_none
from resilient.catalog.outcomes import VERDICT, read_outcome
from resilient.catalog.parallel import each as of_each
from resilient.catalog.standing import STOPPED, cause_of
from resilient.clock import Clock, rfc3339
from resilient.errors import ErrorKind, UsageError
from resilient.format import layout
from resilient.format.documents import Outcome
from resilient.format.evidence import IN_FULL, Evidence, Explanation, decode, encode_evidence, encode_explanation
from resilient.policy.failures.actions import Attempt, Budgets, Decision, decide
from resilient.policy.failures.classes import Action, FailureClass
from resilient.policy.failures.reading import parse_rules
from resilient.policy.failures.rules import RULES, Rule
from resilient.policy.failures.verdict import Account, Confidence, Verdict, explain
from resilient.store.base import Store

_COLLECTIVE: Final = "/torch/distributed/"
NO_RANK: Final = -1
_MOST: Final = 16
"""Generations that are looked at, for how often a failure has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A generation that failed: what each rank has left, what began it, and what to do."""

    generation: int
    world_size: int | None
    records: tuple[Evidence, ...]
    verdict: Verdict
    decision: Decision


def load_rules(path: str | None) -> tuple[Rule, ...]:
    """Return the rules of a user's file, then those of this package.

    Raises:
        UsageError: kind ``invalid-setting``: it cannot be read, or holds something else.
    """
    if path is None:
        return RULES
    try:
        return (*parse_rules(Path(path).read_text(encoding="utf-8")), *RULES)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the rules of {path} cannot be used: {error}",
            kind=ErrorKind.INVALID_SETTING,
            hint='it must be TOML such as: [[rule]] class = "device-hardware" patterns = ["my driver: .* is gone"]',
        ) from error


def write_evidence(store: Store, evidence: Evidence) -> None:
    """Leave a record. Of several who have seen the end of one process, the first one counts."""
    what = "-there" if evidence.bystander else "" if evidence.seen_by is None else "-seen"
    create_once(store, layout.evidence(evidence.generation, evidence.rank, what), encode_evidence(evidence))


def read_evidence(store: Store, generation: int) -> list[Evidence]:
    """Return what was left of a generation's failure, by rank; a record that is torn counts as absent."""
    keys = sorted(key for key in store.list(layout.evidence(generation)) if layout.is_evidence(key))

    def read(key: str) -> Evidence | None:
        data = read_or_none(store, key)
        return None if data is None else decode(Evidence, data, key)

    found = [record for record in of_each(read, keys) if record is not None and record.generation == generation]
    claim = read_claim(store, generation)
    return [record for record in found if claim is None or record.nonce == claim.nonce]


def write_explanation(store: Store, explained: Explained, *, acted: bool, clock: Clock) -> None:
    """Keep what was concluded, for those who ask how often this has come."""
    document = in_writing(explained, acted=acted, created=rfc3339(clock.now()))
    create_once(store, layout.explanation(explained.generation), encode_explanation(document))


def in_writing(explained: Explained, *, acted: bool = False, created: str = "") -> Explanation:
    """Return what was concluded as it is kept; ``created``, RFC 3339, is empty where it is only looked at."""
    verdict, decision = explained.verdict, explained.decision
    return Explanation(
        generation=explained.generation,
        failure=verdict.failure,
        confidence=verdict.confidence,
        why=verdict.why,
        rank=verdict.rank,
        node=verdict.node,
        step=verdict.step,
        proof=verdict.proof,
        follows=verdict.follows,
        action=decision.action,
        because=decision.why,
        acted=acted,
        created=created,
    )


def read_explanation(store: Store, generation: int) -> Explanation | None:
    """Return what the next life has concluded about a generation; None if nothing was kept, or it is torn."""
    key = layout.explanation(generation)
    data = read_or_none(store, key)
    return None if data is None else decode(Explanation, data, key)


def explain_generation(
    store: Store, generation: int, line: Line, *, rules: Sequence[Rule], budgets: Budgets
) -> Explained | None:
    """Return what is known of the failure of a generation; None if it has left no word of one."""
    records = read_evidence(store, generation)
    verdict = _verdict(store, generation, records, rules, line)
    if verdict is None:
        return None
    history = [Attempt(verdict=verdict, progressed=_progressed(store, generation, line))]
    history += _earlier(store, generation, line, rules) if not history[0].progressed else []
    claim = read_claim(store, generation)
    return Explained(
        generation=generation,
        world_size=None if claim is None else claim.world_size,
        records=tuple(records),
        verdict=verdict,
        decision=decide(history, budgets),
    )


def explain_silence(store: Store, generation: int) -> Explained:
    """Return what can be said of a generation that has ended, not as planned, and has left no word at all."""
    claim = read_claim(store, generation)
    verdict = explain((), expected=0 if claim is None else claim.world_size)
    decision = Decision(action=Action.RESTART, why="nothing speaks against it")
    world_size = None if claim is None else claim.world_size
    return Explained(generation=generation, world_size=world_size, records=(), verdict=verdict, decision=decision)


def _verdict(
    store: Store, generation: int, records: Sequence[Evidence], rules: Sequence[Rule], line: Line | None
) -> Verdict | None:
    outcome = read_outcome(store, generation)
    if outcome is not None and outcome.cause == VERDICT:
        return _refused(outcome)
    hung = _of_hang(store, generation, records, line)
    if not records and hung is None:
        return None if outcome is None else explain([_of_outcome(outcome)], expected=0, rules=rules)
    expected = min(IN_FULL, max((record.world_size for record in records), default=0))
    # What ended the one that hung came after that, and is no cause.
    accounts = [_account(record) for record in records if hung is None or record.rank != hung.rank]
    verdict = explain([*accounts, *([] if hung is None else [hung])], expected=expected, rules=rules)
    if verdict.failure is FailureClass.NETWORK and max((each.world_size for each in records), default=0) > IN_FULL:
        why = f"no rank below {IN_FULL} has failed by itself, and of the others only first causes are kept"
        return replace(verdict, failure=FailureClass.UNKNOWN, why=why)
    return replace(verdict, rank=None, node=None) if verdict.rank == NO_RANK else verdict


def _of_hang(store: Store, generation: int, records: Sequence[Evidence], line: Line | None) -> Account | None:
    """Return what was found of the hang that the generation ended by, if it did; of the rank that is the cause.

    If that cannot be told, or has left nothing, the account is of no rank: -1.
    """
    hangs = read_hangs(store, generation)
    steps = [record.step for record in records if record.step is not None]
    steps += [commit.step for commit in (() if line is None else line.commits) if commit.generation == generation]
    if not hangs or max(steps, default=0) > max(hang.step for hang in hangs):
        return None  # it has gone on since
    cause = cause_of(hangs)
    at = next((hang for hang in hangs if hang.rank == cause.rank), None)
    some = at or hangs[0]
    wall_s = datetime.fromisoformat(some.created).timestamp()
    kind = "frozen" if at is not None and at.state in STOPPED else "hang"
    where = cause.section or some.section
    said = f"{kind}: in {where} after step {some.step} for {some.age_s:.0f} s; {cause.why}"
    return Account(
        rank=NO_RANK if at is None else at.rank,
        host="" if at is None else at.host,
        lines=(said,),
        wall_s=wall_s,
        monotonic_s=wall_s,
        clock="hang",
        step=some.step,
    )


def _earlier(store: Store, generation: int, line: Line, rules: Sequence[Rule]) -> Iterator[Attempt]:
    """Yield the failures before a generation, the newest first, up to a life that got further or did not fail."""
    for number in range(generation - 1, max(0, generation - _MOST), -1):
        verdict = _kept(store, number) or _verdict(store, number, read_evidence(store, number), rules, line)
        if verdict is None:
            return
        progressed = _progressed(store, number, line)
        yield Attempt(verdict=verdict, progressed=progressed)
        if progressed:
            return


def _kept(store: Store, generation: int) -> Verdict | None:
    kept = read_explanation(store, generation)
    if kept is None or kept.failure not in set(FailureClass) or kept.confidence not in set(Confidence):
        return None  # of a newer library
    return Verdict(
        failure=FailureClass(kept.failure),
        confidence=Confidence(kept.confidence),
        why=kept.why,
        rank=kept.rank,
        node=kept.node,
        step=kept.step,
        proof=kept.proof,
        follows=kept.follows,
    )


def _progressed(store: Store, generation: int, line: Line) -> bool:
    """Say whether a generation has committed something that counts, or that the next one has gone on from."""
    if any(commit.generation == generation for commit in line.commits):
        return True
    following = read_base(store, generation + 1)
    return following is not None and following.base_generation == generation


def _refused(outcome: Outcome) -> Verdict:
    return Verdict(
        failure=FailureClass.CRASH_LOOP,
        confidence=Confidence.CERTAIN,
        why="the run was not tried again",
        proof=(f"rank {outcome.rank}: {outcome.message}",),
    )


def _of_outcome(outcome: Outcome) -> Account:
    """What a generation has said that has left no evidence: an older version of this package wrote it."""
    return Account(
        rank=outcome.rank,
        host="",
        lines=(f"{outcome.error}: {outcome.message}",),
        wall_s=0.0,
        monotonic_s=0.0,
        clock="",
        step=outcome.step,
        place="a training function",
    )


def _account(record: Evidence) -> Account:
    users = [frame for frame in record.frames if frame.owner == "user"]
    if record.bystander and not any(_COLLECTIVE in frame.file for frame in record.frames):
        users = []  # computing, or asleep: that is not to be compared with where others wait for each other
    return Account(
        rank=record.rank,
        host=record.host,
        lines=record.lines,
        context=record.stderr,
        wall_s=record.wall_s + (record.offset_s or 0.0),
        monotonic_s=record.monotonic_s,
        clock=record.clock,
        own=record.seen_by is None,
        bystander=record.bystander,
        place=f"{users[-1].file}:{users[-1].line}" if users else "",
        oom=record.oom_kills > 0,
        step=record.step,
        first_rank=record.first_rank,
        local_ranks=record.local_world_size,
    )
