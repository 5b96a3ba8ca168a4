"""What `every="auto"` takes of a real training: the GPT example, saved as often as a failure each minute makes best."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import resilient
from resilient.events import Event, SaveFenced, SaveStarted
from resilient.policy import interval as interval_module
from resilient.run.session import Run
from tests.figures import Figures

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt"
MTBF_S = 60.0


@pytest.mark.proof
def test_the_overhead_on_the_gpt_example_stays_under_its_budget(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: Callable[[int, int], int],
    figures: Callable[[str, str], Figures],
) -> None:
    kept = figures(
        "auto-overhead", 'GPT example, every="auto" with a failure each minute: share of time that saves take'
    )
    if len(kept):
        return
    # A failure each minute: what pays then would be hundreds of times as often as it usually does.
    monkeypatch.setattr(interval_module, "PRIOR_MTBF_S", MTBF_S)
    monkeypatch.setattr("resilient.run.pace.mean_time_between_failures", lambda *_: MTBF_S)
    monkeypatch.setattr(interval_module, "FIRST_SAVE_S", 0.5)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import model as example  # type: ignore[import-not-found]

    monkeypatch.delitem(sys.modules, "model")
    stalls: list[tuple[float, float]] = []
    saves: list[int] = []
    train_s, budget, steps_s = count(8, 120), 0.05, list[float]()

    def follow(event: Event) -> None:
        if isinstance(event, SaveStarted) and event.reason == "interval":
            saves.append(event.step)
            stalls.append((time.monotonic(), event.stall_s))
        elif isinstance(event, SaveFenced) and stalls:
            stalls.append((time.monotonic(), event.waited_s))

    @resilient.train(tmp_path / "run", every="auto", overhead_budget=budget)
    def main(run: Run) -> None:
        run._bus.subscribe(follow)
        torch.manual_seed(0)
        data, model = example.Text(), example.GPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        sampler = resilient.ElasticSampler(len(data), global_batch=16, seed=0)
        run.track(model=model, optimizer=optimizer, data=sampler)
        end_s = time.monotonic() + train_s
        for inputs, targets in run.steps(DataLoader(data, batch_sampler=sampler), total=1_000_000):
            steps_s.append(time.monotonic())
            model(inputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if time.monotonic() > end_s:
                break

    main()
    # From the fourth save on: by then the cost is known, whatever the first one had to prepare.
    began_s = stalls[3][0] - stalls[3][1]
    paid_s = sum(stall_s for at_s, stall_s in stalls if at_s >= began_s)
    overhead = paid_s / (steps_s[-1] - began_s)
    assert len(saves) >= 5
    assert overhead <= budget
    kept.add(seconds=train_s, saves=len(saves), steps=len(steps_s), overhead=round(overhead, 5), budget=budget)
