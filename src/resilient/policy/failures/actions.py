"""What to do about a failure: a pure decision from the verdicts on the last lives of a run, and its budgets.

Only lives without progress count: a run that gets further each time may go on for ever. The ladder of a class (see
`resilient.policy.failures.classes`) is climbed by one rung for each failure of that class in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resilient.policy.failures.classes import ABOUT, Action, FailureClass, Owner
from resilient.policy.failures.verdict import Confidence, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One life of a run that has failed. ``progressed``: it has committed a step beyond what it started from."""

    verdict: Verdict
    progressed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """``attempts``: so many failures in a row without progress end the run. ``spares``: nodes that could step in."""

    attempts: int = 3
    spares: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, and why; ``node``: which one to leave out."""

    action: Action
    why: str
    node: str | None = None


def decide(history: Sequence[Attempt], budgets: Budgets) -> Decision:
    """Return what to do after the newest failure.

    Guarantees: an error of the program never excludes a node; a fault of the platform never stops a run that has
    spares; what is only possible excludes no node.

    Args:
        history: the lives that failed, the newest first, without a gap; at least one.
        budgets: how often.
    """
    newest = history[0].verdict
    about = ABOUT[newest.failure]
    row = _in_a_row(history)
    alike = [each for each in row if each.failure is newest.failure]
    platform = about.owner is Owner.PLATFORM
    if not about.spends:
        return Decision(action=about.ladder[0], why=f"{about.title} costs the run nothing")
    if len(row) >= budgets.attempts and not (platform and budgets.spares):
        return Decision(action=Action.STOP, why=f"{len(row)} failures in a row without progress")
    if len(alike) > 1 and not platform and _is_same(alike[0], alike[1]):
        return Decision(action=Action.STOP, why="the same failure at the same step, twice without progress")
    action = about.ladder[min(len(alike), len(about.ladder)) - 1]
    if action is Action.STOP and newest.failure is FailureClass.USER_ERROR and len(alike) < budgets.attempts:
        return Decision(action=Action.RESTART, why="another error than the last time: it may be the data's")
    if action is Action.EXCLUDE_NODE:
        return _exclude(newest, alike)
    return Decision(action=action, why=f"{about.title}, {_count(len(alike))} in a row without progress")


def _in_a_row(history: Sequence[Attempt]) -> list[Verdict]:
    """Return the failures since the last progress that cost something, the newest first."""
    row = []
    for each in history:
        if ABOUT[each.verdict.failure].spends:
            row.append(each.verdict)
        if each.progressed:
            break
    return row


def _is_same(one: Verdict, other: Verdict) -> bool:
    return one.step == other.step and one.fingerprint == other.fingerprint


def _exclude(newest: Verdict, alike: Sequence[Verdict]) -> Decision:
    first_time = ABOUT[newest.failure].ladder[0] is Action.EXCLUDE_NODE
    if newest.node is None:
        return Decision(action=Action.RESTART, why="it is not known which node it was")
    if newest.confidence is Confidence.POSSIBLE:
        return Decision(action=Action.RESTART, why=f"it is only possible that {newest.node} is to blame")
    if not first_time and newest.node != alike[1].node:
        return Decision(action=Action.RESTART, why="it was another node the last time")
    again = "" if first_time else ", again"
    return Decision(action=Action.EXCLUDE_NODE, why=f"{ABOUT[newest.failure].title}{again}", node=newest.node)


def _count(number: int) -> str:
    return {1: "the first", 2: "the second", 3: "the third"}.get(number, f"number {number}")
