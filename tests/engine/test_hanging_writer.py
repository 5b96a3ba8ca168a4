"""A writer process that stands still is replaced after a deadline, and training never waits for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import resilient
from resilient.events import Event, Notice, SaveFailed
from tests.lives import writers_of

STOPPED_AT, WORKS_AT, TOTAL = 2, 5, 8


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("why", "numel"),
    [("has not taken an order", 4), ("has said nothing", 1 << 24)],
    ids=["before it takes the order", "while it writes"],
)
def test_a_writer_that_stands_still_is_replaced_and_costs_the_save_in_hand_alone(
    why: str, numel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resilient.engine.patience._TAKE_S", 2.0 if "order" in why else 60.0)
    monkeypatch.setattr("resilient.engine.patience._GRACE_S", 1.0)
    events: list[Event] = []
    steps_meanwhile = 0
    others = set(writers_of(os.getpid()))
    timeout_s = 60 if "order" in why else 6

    @resilient.train(tmp_path / "run", every=10**6, commit_timeout_s=timeout_s)
    def main(run: resilient.Run) -> None:
        nonlocal steps_meanwhile
        run._bus.subscribe(events.append)
        state = {"w": torch.zeros(numel)}
        run.track(state=state)
        (pid,) = set(writers_of(os.getpid())) - others
        handle = None
        for _ in run.steps(range(TOTAL), total=TOTAL):
            if run.step == STOPPED_AT:
                if "order" in why:
                    os.kill(pid, signal.SIGSTOP)
                    handle = run.save()
                else:
                    handle = run.save()
                    handle.staged.result(60)
                    os.kill(pid, signal.SIGSTOP)
            if handle is not None and run.step < WORKS_AT:
                steps_meanwhile += not handle.committed.done()
            if run.step == WORKS_AT:
                assert handle is not None
                with pytest.raises(resilient.ResilientError, match="SIGKILL"):
                    handle.wait(90)
                run.save().wait(60)
            state["w"][0] += 1

    main()
    assert steps_meanwhile == WORKS_AT - STOPPED_AT, "training has waited for the writer"
    assert [event.step for event in events if isinstance(event, SaveFailed)] == [STOPPED_AT]
    assert [event for event in events if isinstance(event, Notice) and why in event.message]
    assert [each.step for each in resilient.checkpoints(tmp_path / "run")] == [TOTAL, WORKS_AT]
