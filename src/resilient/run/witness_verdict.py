"""Saying why the life before has failed, and what is to be done about it, before anything is done."""

from __future__ import annotations

from typing import Final

from resilient.catalog.evidence import explain_generation, load_rules, read_evidence, write_explanation
from resilient.catalog.hangs import read_hangs
from resilient.catalog.line import read_line
from resilient.clock import Clock
from resilient.config import Settings
from resilient.events import Bus, FailureExplained
from resilient.policy.failures.actions import Budgets
from resilient.policy.failures.classes import Action
from resilient.run.opening import Opened

_DONE_ANYWAY: Final = frozenset({Action.RETRY, Action.RESTART})
"""What a life that begins is: the only actions that a run takes by itself, besides those of `judge_failures`."""


def tell_failure(opened: Opened, settings: Settings, *, bus: Bus, clock: Clock) -> None:
    """Emit `FailureExplained` for the generation before this one, and keep it; nothing if that has left no word.

    Rank 0 alone. Costs one listing if the last life did not fail.

    Raises:
        UsageError: the rules of the setting ``rules`` cannot be used.
    """
    store, last = opened.store, opened.claim.generation - 1
    rules = load_rules(settings.rules)  # also where nothing has failed: a mistake in them is to be told at once
    if last < 1 or not (read_evidence(store, last) or read_hangs(store, last)):
        return
    budgets = Budgets(attempts=settings.max_failed_attempts)
    explained = explain_generation(store, last, read_line(store), rules=rules, budgets=budgets)
    if explained is None:
        return
    verdict, decision = explained.verdict, explained.decision
    acts = settings.policy == "act" and decision.action in _DONE_ANYWAY
    bus.emit(
        FailureExplained(
            rank=opened.peers.rank,
            generation=last,
            failure=verdict.failure,
            confidence=verdict.confidence,
            why=verdict.why,
            at_rank=verdict.rank,
            node=verdict.node,
            proof=verdict.proof,
            action=decision.action,
            because=decision.why,
            acts=acts,
        )
    )
    write_explanation(store, explained, acted=acts, clock=clock)
