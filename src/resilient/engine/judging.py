"""What a restart concludes from the failures before it: demote a checkpoint, take that back, or refuse to try again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from resilient.catalog.commit import read_commit
from resilient.catalog.generations import write_base
from resilient.catalog.line import Line, is_given_up, read_line
from resilient.catalog.marks import FAILED, GOOD, RUN, USER, is_failed, read_mark, remove_mark, write_mark
from resilient.catalog.outcomes import VERDICT, History, read_history, write_outcome
from resilient.clock import Clock, rfc3339
from resilient.config import Settings
from resilient.errors import ConflictError, ErrorKind, UsageError
from resilient.events import Bus, Demoted, Refused, Reinstated
from resilient.format.documents import Claim, Commit, Outcome
from resilient.format.layout import Attempt
from resilient.policy.demotion import NUMERIC, SOON_STEPS, Demote, Failure, Life, Verdict, judge
from resilient.store.base import Store

_CANDIDATES: Final = 50


def judge_failures(store: Store, claim: Claim, settings: Settings, *, bus: Bus, clock: Clock) -> None:
    """Look at how the lives before this generation ended, and act on it; rank 0 alone, before it restores.

    Costs one or two small reads if the last one did not fail. Nothing is decided from a listing or from a clock.

    Raises:
        UsageError: kind ``crash-loop``: the same failure has come back so often that a further try would be in vain. A
            new launch tries again.
    """
    history = read_history(store, before=claim.generation)
    if history.verdict is not None:
        if history.verdict.launch != claim.launch:
            return  # somebody has started it again: what was before counts no more
        bus.emit(Refused(why=history.verdict.message))
        _record(store, claim, history.verdict.message, clock)
        raise _crash_loop(store, history.verdict.message)
    if not history.lives or history.lives[0].failure is None:
        return
    line = read_line(store)
    commits = {commit.attempt: commit for commit in line.commits[:_CANDIDATES]}
    demoted = {life.start for life in history.lives if life.start is not None and _is_demoted(store, life.start)}
    decision = judge(
        _with_progress(history, line),
        [attempt for attempt in commits if is_failed(store, attempt) is None],
        demoted,
        max_demotions=0 if _is_vouched_for(store, history.lives[0].start) else settings.max_demotions,
        max_failed_attempts=settings.max_failed_attempts,
    )
    if isinstance(decision, Demote):
        why = _why_demoted(decision.failure)
        write_mark(store, decision.start, FAILED, by=RUN, why=why, clock=clock)
        bus.emit(Demoted(step=decision.start.step, why=why))
    elif decision is not None:
        why = _why_refused(decision)
        bus.emit(Refused(why=why))
        _reinstate(store, claim, line, decision.reinstate, bus)
        _record(store, claim, why, clock)
        raise _crash_loop(store, why)


def _is_demoted(store: Store, attempt: Attempt) -> bool:
    return read_mark(store, attempt, FAILED, RUN) is not None


def _is_vouched_for(store: Store, start: Attempt | None) -> bool:
    """Say whether a person has marked it good, which a run does not overrule."""
    return start is not None and read_mark(store, start, GOOD, USER) is not None


def _with_progress(history: History, line: Line) -> list[Life[Attempt]]:
    newest, *others = history.lives
    progressed = any(commit.generation == history.newest for commit in line.commits)
    return [Life(start=newest.start, failure=newest.failure, progressed=progressed), *others]


def _reinstate(store: Store, claim: Claim, line: Line, starts: Sequence[Attempt], bus: Bus) -> None:
    """Take demotions back; the next launch goes on from the newest of them, if nothing newer has come since."""
    for start in starts:
        if remove_mark(store, start, FAILED, RUN):
            bus.emit(Reinstated(step=start.step, why="the run has failed in the same way without it"))
    newest = max(starts, key=lambda start: start.step, default=None)
    if newest is None or (line.commits and line.commits[0].step >= newest.step):
        return
    commit = _usable(store, newest)
    if commit is not None:
        # The life that started from an older one has taken it off the line. This generation continues from it, and so
        # does the next.
        with suppress(ConflictError):  # it has just been deleted: the older ones are what there is
            write_base(store, claim, commit)


def _usable(store: Store, attempt: Attempt) -> Commit | None:
    return None if is_given_up(store, attempt) else read_commit(store, attempt)


def _record(store: Store, claim: Claim, why: str, clock: Clock) -> None:
    outcome = Outcome(
        generation=claim.generation,
        nonce=claim.nonce,
        launch=claim.launch,
        rank=0,
        error=UsageError.__name__,
        message=why,
        cause=VERDICT,
        program="",
        step=0,
        created=rfc3339(clock.now()),
    )
    write_outcome(store, outcome)


def _why_demoted(failure: Failure) -> str:
    kind = "numeric failures" if failure.cause == NUMERIC else "failures"
    return f"two {kind} alike within {SOON_STEPS} steps after restoring it ({failure})"


def _why_refused(verdict: Verdict[Attempt]) -> str:
    steps = [f"step {start.step}" if start is not None else "a fresh start" for start in verdict.starts]
    if verdict.spent:
        return (
            f"{steps[0]} has led to the failure {verdict.failure} twice, and {verdict.spent} newer checkpoints are "
            "marked failed already"
        )
    what = f"the last {verdict.lives} lives have failed in the same way at step {verdict.failure.step}"
    if len(steps) > 1:
        return f"{what}, from {' and from '.join(steps)}: it is not the checkpoint ({verdict.failure})"
    return f"{what}, all from {steps[0]} ({verdict.failure})"


def _crash_loop(store: Store, why: str) -> UsageError:
    return UsageError(
        f"{store.url}: {why}",
        kind=ErrorKind.CRASH_LOOP,
        hint="look at the first traceback of the last life; once what fails is mended, start the job anew",
    )
