"""How earlier lives of a run have ended, as far as they could say: what a restart may learn from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from resilient.catalog.generations import read_base
from resilient.catalog.once import create_once, read_document
from resilient.errors import CorruptError, ErrorKind
from resilient.format import layout
from resilient.format.documents import Outcome, encode_document
from resilient.format.layout import Attempt
from resilient.policy.demotion import Failure, Life
from resilient.store.base import Store

VERDICT: Final = "verdict"
"""The cause of a generation that was refused."""

_MOST: Final = 64
"""Generations that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The lives before a generation, the newest first; ``newest`` is the generation of that one.

    ``verdict``: the run was refused after them, and nothing came since; what led to that counts no more.
    """

    lives: tuple[Life[Attempt], ...] = ()
    newest: int = 0
    verdict: Outcome | None = None


def write_outcome(store: Store, outcome: Outcome) -> bool:
    """Say by which failure a generation ended, unless another rank has; say whether it was this one.

    The first one counts: what follows from a failure on other ranks comes later, for a process says this before it
    ends, and it is by its end that the others notice.
    """
    return create_once(store, layout.outcome(outcome.generation), encode_document(outcome))


def read_outcome(store: Store, generation: int) -> Outcome | None:
    """Return by which failure a generation ended; None if it has not said so, or that does not parse."""
    try:
        outcome = read_document(store, Outcome, layout.outcome(generation))
    except CorruptError as error:
        if error.kind is ErrorKind.NEWER_FORMAT:
            raise
        return None
    return outcome if outcome is not None and outcome.generation == generation else None


def left_out(store: Store, *, before: int) -> dict[str, list[tuple[int, int]]]:
    """Return the samples that the failed lives right before a generation do not want to be used again, by sampler.

    One small read, if the last one has not failed.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for generation in range(before - 1, max(0, before - 1 - _MOST), -1):
        outcome = read_outcome(store, generation)
        if outcome is None or outcome.cause == VERDICT:
            break
        for name, place in outcome.leave_out.items():
            found.setdefault(name, []).append(place)
    return found


def read_history(store: Store, *, before: int) -> History:
    """Return how the lives before a generation went, by exact names; if the last one did not fail, that one alone."""
    lives: list[Life[Attempt]] = []
    newest = 0
    for generation, start, outcome in _endings(store, before):
        if outcome is not None and outcome.cause == VERDICT:
            return History(lives=tuple(lives), newest=newest, verdict=outcome if not lives else None)
        newest = newest or generation
        newer = lives[-1].start if lives else None
        life = Life(
            start=start,
            failure=None if outcome is None else _failure(outcome),
            progressed=newer is not None and newer.generation == generation,
        )
        lives.append(life)
        if _ends_all(life, lives[0].failure):
            break
    return History(lives=tuple(lives), newest=newest)


def _ends_all(life: Life[Attempt], newest: Failure | None) -> bool:
    """Say whether nothing before this life has to do with the newest failure."""
    if newest is None:
        return True
    return life.progressed and (life.failure is None or not life.failure.is_like(newest))


def _endings(store: Store, before: int) -> Iterator[tuple[int, Attempt | None, Outcome | None]]:
    for generation in range(before - 1, max(0, before - 1 - _MOST), -1):
        outcome = read_outcome(store, generation)
        base = read_base(store, generation) if outcome is None else None
        if outcome is not None:
            yield generation, outcome.restored, outcome
        elif base is not None:
            yield generation, base.attempt, None
        # One with neither has ended before it had restored anything.


def _failure(outcome: Outcome) -> Failure:
    return Failure(
        error=outcome.error,
        message=outcome.message,
        program=outcome.program,
        cause=outcome.cause,
        step=outcome.step,
        since=outcome.step - (outcome.restored_step or 0),
        leaves_out=" ".join(f"{name}:{epoch}:{at}" for name, (epoch, at) in sorted(outcome.leave_out.items())),
    )
