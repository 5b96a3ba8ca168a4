"""The ten questions that a person asks of a run, with the answers that an account has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from resilient.policy.failures.classes import FailureClass
from resilient.report import words
from resilient.report.model import PRODUCTIVE, Incident, Ledger
from resilient.report.units import count, duration, join, moment, number, one_line, percent

_NO_FAILURE: Final = "nothing has failed"
_KINDS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    question: str
    answer: str


def answers(ledger: Ledger) -> tuple[Answer, ...]:
    """Return the questions with their answers; of several failures it is the last one that is answered for."""
    last = ledger.incidents[-1] if ledger.incidents else None
    return tuple(
        Answer(question=question, answer=answer)
        for question, answer in (
            ("What failed?", _what(ledger, last)),
            ("When?", "never" if last is None else f"{moment(last.at_s)}, after step {number(last.last_step)}"),
            ("On which rank?", _NO_FAILURE if last is None else words.where(last)),
            ("Whose fault was it?", _NO_FAILURE if last is None else _fault(last)),
            ("What did it cost?", "nothing" if last is None else _cost(ledger, last)),
            ("From where did it come back?", _NO_FAILURE if last is None else words.came_back(last)),
            ("What would be lost now?", _stakes(ledger)),
            ("How much time was productive?", _productive(ledger)),
            ("What took most of the rest?", _largest(ledger)),
            ("What should be changed?", words.advice(ledger)[0]),
        )
    )


def _what(ledger: Ledger, last: Incident | None) -> str:
    if last is None:
        return _NO_FAILURE
    if len(ledger.incidents) == 1:
        return f"{words.failure(last)}, once"
    kinds = Counter(each.failure for each in ledger.incidents)
    shown = [
        one_line(kind, most=40) + (f" {times} times" if times > 1 else "") for kind, times in kinds.most_common(_KINDS)
    ]
    shown += [f"{len(kinds) - _KINDS} other kinds"] if len(kinds) > _KINDS else []
    return f"{words.failure(last)}: the last of {len(ledger.incidents)} failures ({join(shown)})"


def _fault(last: Incident) -> str:
    unknown = last.failure == FailureClass.UNKNOWN
    return f"{words.fault(last)}; {'' if unknown else 'this is '}{words.confidence(last)}"


def _cost(ledger: Ledger, last: Incident) -> str:
    own = f"{duration(last.cost_s)} and {count(last.lost_steps, 'step')} done again ({words.costs(last.parts)})"
    if len(ledger.incidents) == 1:
        return own
    total_s = sum(each.cost_s for each in ledger.incidents)
    steps = sum(each.lost_steps for each in ledger.incidents)
    return f"{own}; all {len(ledger.incidents)} failures together {duration(total_s)} and {count(steps, 'step')}"


def _stakes(ledger: Ledger) -> str:
    if not ledger.stakes:
        return words.no_stake(ledger)
    return "; ".join(f"with {each.what}: {words.stake(each)}" for each in ledger.stakes)


def _productive(ledger: Ledger) -> str:
    if ledger.wall_s <= 0:
        return "there is no time to account for yet"
    kept_s = sum(ledger.parts.get(part, 0.0) for part in PRODUCTIVE)
    share = f"{percent(ledger.ettr)}: {duration(kept_s)} of {duration(ledger.wall_s)} (ETTR {ledger.ettr:.3f})"
    said = words.promise(ledger)
    return f"{share}; {said}" if said else share


def _largest(ledger: Ledger) -> str:
    lost = words.badput(ledger)
    if not lost:
        return "nothing: all of the time was productive" if ledger.wall_s > 0 else "nothing"
    part, seconds = lost[0]
    return f"{part}, {duration(seconds)}: {words.MEANING[part]}"
