"""What is done about a failure, the first time and then: budgets count only what brought no progress."""

from __future__ import annotations

import pytest

from resilient.policy.failures.actions import Attempt, Budgets, decide
from resilient.policy.failures.classes import ABOUT, Action, FailureClass, Owner
from resilient.policy.failures.verdict import Confidence, Verdict

TEN = Budgets(attempts=10)


def failed(
    failure: str,
    *,
    step: int = 5,
    node: str | None = "a",
    said: str = "x",
    progressed: bool = False,
    confidence: str = "likely",
) -> Attempt:
    verdict = Verdict(
        failure=FailureClass(failure),
        confidence=Confidence(confidence),
        why="",
        rank=0,
        node=node,
        step=step,
        proof=(f"rank 0: {said}",),
    )
    return Attempt(verdict=verdict, progressed=progressed)


def actions(*history: Attempt, budgets: Budgets = TEN) -> list[str]:
    """Return what is done after each of these, the oldest first."""
    newest_first = list(history)[::-1]
    return [str(decide(newest_first[-count:], budgets).action) for count in range(1, len(history) + 1)]


LADDERS = [
    ([failed("user-error"), failed("user-error")], ["restart", "stop"]),
    ([failed("user-error", step=5), failed("user-error", step=6)], ["restart", "restart"]),
    ([failed("user-error", said="x"), failed("user-error", said="y")], ["restart", "restart"]),
    ([failed("host-oom"), failed("host-oom", step=6)], ["restart", "stop"]),
    ([failed("shared-memory")], ["stop"]),
    ([failed("device-hardware")], ["exclude-node"]),
    ([failed("device-assert"), failed("device-assert")], ["restart", "stop"]),
    ([failed("device-assert"), failed("device-assert", step=6)], ["restart", "exclude-node"]),
    ([failed("device-assert"), failed("device-assert", step=6, node="b")], ["restart", "restart"]),
    ([failed("network"), failed("network", step=6)], ["retry", "exclude-node"]),
    ([failed("node-lost")], ["exclude-node"]),
    ([failed("bad-checkpoint")], ["fall-back"]),
    ([failed("numerics"), failed("numerics", step=6)], ["restart", "fall-back"]),
    (
        [failed("unknown"), failed("unknown", step=6), failed("unknown", step=7)],
        ["restart", "exclude-node", "stop"],
    ),
    ([failed("preemption")] * 9, ["restart"] * 9),
    ([failed("coordinator-lost")] * 9, ["restart"] * 9),
    ([failed("cancelled")], ["stop"]),
]


@pytest.mark.parametrize(
    ("history", "expected"),
    LADDERS,
    ids=[f"{number} {history[0].verdict.failure}" for number, (history, _) in enumerate(LADDERS)],
)
def test_ladders(history: list[Attempt], expected: list[str]) -> None:
    assert actions(*history) == expected


def test_a_run_that_gets_further_each_time_never_ends() -> None:
    history = [failed("user-error", step=step, progressed=True) for step in range(1, 40)]
    assert set(actions(*history, budgets=Budgets(attempts=3))) == {"restart"}


def test_without_progress_the_budget_ends_it_whatever_fails() -> None:
    history = [failed("user-error", step=1), failed("network", step=2), failed("hang", step=3)]
    assert actions(*history, budgets=Budgets(attempts=3))[-1] == "stop"
    free = [failed("preemption"), failed("preemption"), failed("user-error")]
    assert actions(*free, budgets=Budgets(attempts=3))[-1] == "restart", "what costs nothing does not count"


def test_a_fault_of_the_platform_never_stops_a_run_that_has_spares() -> None:
    for failure, about in ABOUT.items():
        if about.owner is not Owner.PLATFORM or failure is FailureClass.STORAGE:
            continue
        history = [failed(failure, step=step) for step in range(8)]
        for count in range(1, 9):
            decision = decide(history[:count], Budgets(attempts=3, spares=1))
            assert decision.action is not Action.STOP, failure


def test_no_node_is_left_out_that_is_not_known_or_only_possibly_to_blame() -> None:
    assert actions(failed("device-hardware", node=None)) == ["restart"]
    assert actions(failed("device-hardware", confidence="possible")) == ["restart"]
    assert decide([failed("device-hardware")], TEN).node == "a"
