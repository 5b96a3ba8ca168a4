"""What signals do to a run: they ask it to stop, beside what the program itself does with them, or nothing at all."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

import resilient


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Have a handler of SIGTERM, as the program of a user has one; return what it has heard."""
    found: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        found.append(number)

    before = signal.signal(signal.SIGTERM, hear)
    yield found
    assert signal.getsignal(signal.SIGTERM) is hear
    signal.signal(signal.SIGTERM, before)


def test_a_signal_in_backward_or_in_the_middle_of_a_save_goes_to_the_handler_of_the_program_alone(
    tmp_path: Path, heard: list[int]
) -> None:
    @resilient.train(tmp_path, every=10**6, keep=resilient.Keep(last=10), stop_signals="none")
    def main(run: resilient.Run) -> None:
        model = torch.nn.Linear(300, 300)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for _ in run.steps(range(5), total=5):
            optimizer.zero_grad()
            if run.step in (2, 4):
                handle = run.save()
                for _ in range(2):  # in the middle of a save, and a second time
                    os.kill(os.getpid(), signal.SIGTERM)
                handle.wait(60)
            loss = model(torch.ones(1, 300)).square().sum()
            if run.step in (1, 3):
                loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGTERM))
            loss.backward()
            optimizer.step()

    main()
    assert heard == [signal.SIGTERM] * 6
    assert [found.step for found in resilient.checkpoints(tmp_path)] == [5, 4, 2]
