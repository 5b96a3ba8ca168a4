"""What a training says of how good its state is reaches the checkpoint, and decides which of them stay."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import resilient
from resilient.catalog.line import read_line
from resilient.errors import UsageError
from resilient.run.metrics import Metrics
from resilient.run.session import Run
from resilient.store.local import LocalStore

LOSSES = {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.2, 5: 0.3, 6: 0.6}


def metrics_of(place: Path) -> dict[int, dict[str, float]]:
    return {commit.step: commit.metrics for commit in read_line(LocalStore(place)).commits}


def test_the_best_checkpoints_stay_beside_the_newest(tmp_path: Path) -> None:
    keep = resilient.Keep(last=1, best=2, metric="loss") | resilient.Keep(last=1, every=3)

    @resilient.train(tmp_path, every="1h", keep=keep)
    def main(run: Run) -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for batch in run.steps(torch.ones(7, 2), total=7):
            if run.step:  # an evaluation of the last boundary's state, and a save of it
                run.metrics(loss=torch.tensor(LOSSES[run.step], requires_grad=True), accuracy=math.nan)
                run.save("eval").wait(60)
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    main()
    found = metrics_of(tmp_path)
    assert found.keys() == {7, 6, 4, 3, 2}
    assert found[7] == {}, "what was said of another state does not go with this one"
    for step in (6, 4, 3, 2):
        assert found[step] == {"loss": pytest.approx(LOSSES[step])}, step


def test_what_is_said_within_a_turn_goes_with_the_save_at_its_end(tmp_path: Path) -> None:
    @resilient.train(tmp_path, every=2, keep=resilient.Keep(last=9))
    def main(run: Run) -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for batch in run.steps(torch.ones(4, 2), total=4):
            if run.step in (0, 2):
                run.metrics(stale=1.0)
            loss = model(batch).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.step == 1:
                run.metrics(loss=loss)
                run.metrics(loss=2.5)

    main()
    assert metrics_of(tmp_path) == {2: {"loss": 2.5}, 4: {}}


@pytest.mark.parametrize("value", ["0.5", None, torch.ones(2), [1.0]], ids=["text", "none", "vector", "list"])
def test_what_is_no_number_is_refused_by_its_name(value: object) -> None:
    with pytest.raises(UsageError, match="loss"):
        Metrics().report({"loss": value})  # type: ignore[dict-item]  # that is the point
