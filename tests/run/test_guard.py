"""Sick numbers in a real loop: a step is run again, and what that shows decides."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import resilient
from resilient.errors import UsageError
from resilient.events import Bus, Event, NumericFault
from resilient.policy.numerics import FEWEST
from resilient.run.session import Run
from tests.lives import Life

SAMPLES = 60
BATCH = 4
SICK_STEP = 8


class Training:
    """A training over numbered samples, with dropout, that writes down which samples each step has used."""

    def __init__(self, place: Path, **settings: object) -> None:
        self.place = place
        self.settings = settings
        self.used: list[int] = []
        self.tries: list[int] = []
        self.weights: list[torch.Tensor] = []

    def run(self, sick: Callable[[list[int], int], float | None], steps: int = 15) -> Training:
        """Train; ``sick`` returns what the loss seems to be, of the samples and of the number of this try."""

        @resilient.train(self.place, every=3, **self.settings)  # type: ignore[arg-type]  # as the caller says
        def main(run: Run) -> None:
            torch.manual_seed(3)
            model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            sampler = resilient.ElasticSampler(SAMPLES, BATCH, seed=1)
            run.track(model=model, optimizer=optimizer, data=sampler)
            self.start = run.step
            step, tries = -1, 0
            for batch in run.steps(DataLoader(range(SAMPLES), batch_sampler=sampler), total=steps):  # type: ignore[arg-type]
                tries = tries + 1 if run.step == step else 1
                step = run.step
                loss = torch.nn.functional.dropout(model(batch[:, None].float()), 0.5).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]  # torch's
                seen = sick(batch.tolist(), tries)
                may = run.watch(loss=loss if seen is None else loss * seen)
                self.tries.append(tries)
                if not may:
                    optimizer.zero_grad()
                    continue
                optimizer.step()
                optimizer.zero_grad()
                self.used += batch.tolist()
            self.skipped = sampler.skipped
            self.weights = [each.detach().clone() for each in model.parameters()]

        main()
        return self


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[NumericFault]:
    found: list[NumericFault] = []
    emit = Bus.emit

    def note(self: Bus, event: Event) -> None:
        if isinstance(event, NumericFault):
            found.append(event)
        emit(self, event)

    monkeypatch.setattr(Bus, "emit", note)
    return found


def order() -> list[list[int]]:
    return list(resilient.ElasticSampler(SAMPLES, BATCH, seed=1))


def healthy(samples: list[int], tries: int) -> float | None:
    del samples, tries
    return None


def once(samples: list[int], tries: int) -> float | None:
    return math.nan if samples == order()[SICK_STEP] and tries == 1 else None


def always(samples: list[int], tries: int) -> float | None:
    del tries
    return math.nan if samples == order()[SICK_STEP] else None


def test_a_fault_of_the_moment_changes_nothing_of_the_result(tmp_path: Path, told: list[NumericFault]) -> None:
    well = Training(tmp_path / "well").run(healthy)
    assert told == []
    once_sick = Training(tmp_path / "once").run(once)
    assert [(each.step, each.outcome, each.action, each.reruns) for each in told] == [
        (SICK_STEP + 1, "transient", "go on", 1)
    ]
    assert once_sick.used == well.used
    assert sorted(once_sick.used) == list(range(SAMPLES))
    for mine, expected in zip(once_sick.weights, well.weights, strict=True):
        assert torch.equal(mine, expected), "the step that was run again has drawn the same random numbers"


def test_samples_that_are_sick_again_are_skipped_and_every_other_one_is_used_once(
    tmp_path: Path, told: list[NumericFault]
) -> None:
    life = Training(tmp_path, on_nonfinite="skip").run(always)
    assert [(each.outcome, each.action) for each in told] == [("reproducible", "skip")]
    assert sorted(life.used + order()[SICK_STEP]) == list(range(SAMPLES))
    assert life.skipped == [(0, SICK_STEP * BATCH, BATCH)]
    (checkpoint, *_) = resilient.checkpoints(tmp_path)
    sampler = resilient.ElasticSampler(SAMPLES, BATCH, seed=1)
    checkpoint.load(into={"data": sampler})
    assert sampler.skipped == life.skipped, "who looks at a checkpoint can tell what it has not seen"


def test_a_run_that_is_rolled_back_goes_on_without_the_samples(tmp_path: Path, told: list[NumericFault]) -> None:
    first = Training(tmp_path, on_nonfinite="rollback")
    with pytest.raises(FloatingPointError, match=f"loss is not finite on rank 0 in step {SICK_STEP + 1}, again, bit"):
        first.run(always)
    assert [(each.outcome, each.action) for each in told] == [("reproducible", "rollback")]
    second = Training(tmp_path, on_nonfinite="rollback").run(always, steps=14)
    assert sorted(first.used[: second.start * BATCH] + second.used + order()[SICK_STEP]) == list(range(SAMPLES))
    assert second.skipped == [(0, SICK_STEP * BATCH, BATCH)]


def test_by_default_what_is_not_finite_ends_the_run_and_a_spike_is_only_told(
    tmp_path: Path, told: list[NumericFault]
) -> None:
    with pytest.raises(FloatingPointError):
        Training(tmp_path / "nan").run(always)
    told.clear()
    seen: list[int] = []

    def spike(samples: list[int], tries: int) -> float | None:
        del samples
        seen.append(tries)
        return 1e6 if len(seen) in (FEWEST + 3, FEWEST + 4) else None

    life = Training(tmp_path / "spike").run(spike, steps=2 * len(order()))
    assert [(each.outcome, each.action) for each in told] == [("reproducible", "report")]
    assert told[0].what == "loss is more than 5 times what is usual on rank 0"
    assert sorted(life.used) == sorted(2 * list(range(SAMPLES)))


def test_what_differs_each_time_and_stays_sick_is_tried_three_times(tmp_path: Path, told: list[NumericFault]) -> None:
    with pytest.raises(FloatingPointError, match="not twice the same"):
        Training(tmp_path).run(lambda samples, tries: math.inf * (-1) ** tries if samples == order()[2] else None)
    assert [(each.outcome, each.reruns) for each in told] == [("unstable", 2)]


def test_whoever_steps_all_the_same_is_told(tmp_path: Path) -> None:
    @resilient.train(tmp_path)
    def main(run: Run) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for _ in run.steps(range(9), total=9):
            model(torch.ones(1, 1)).sum().backward()
            run.watch(loss=math.nan if run.step == 1 else 1.0)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(UsageError, match="has returned False in step 2, and the optimizer has stepped"):
        main()


def test_nobody_can_skip_samples_that_nobody_knows(tmp_path: Path) -> None:
    @resilient.train(tmp_path, on_nonfinite="skip")
    def main(run: Run) -> None:
        run.track(state={"x": torch.zeros(1)})
        for _ in run.steps(range(9), total=9):
            run.watch(loss=math.nan)

    with pytest.raises(UsageError, match="not that of an ElasticSampler"):
        main()


def two_ranks(place: str) -> None:
    @resilient.train(place)
    def main(run: Run) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        failed: set[int] = set()
        for _ in run.steps(range(6), total=6):
            sick = run.step in (3, 4) and run.step not in failed
            failed.add(run.step)
            mine = sick and run.rank == 4 - run.step
            # As after the exchange of gradients: one sick rank makes the norm sick on all.
            if run.watch(loss=math.nan if mine else 1.0, norm=math.nan if sick else 1.0):
                optimizer.step()

    main()


def test_all_ranks_run_a_step_again_of_which_one_was_sick_and_that_one_is_named(tmp_path: Path) -> None:
    life = Life(2, tmp_path / "logs", two_ranks, str(tmp_path / "run"))
    assert life.wait() == [0, 0], life.output()
    said = (tmp_path / "logs" / "rank-0.log").read_text()
    assert "step 4: loss is not finite on rank 1; fine when it was run again" in said
    assert "step 5: loss is not finite on rank 0; fine when it was run again" in said, "the norm is sick on all ranks"


def test_what_stays_high_is_what_is_usual_from_then_on(tmp_path: Path, told: list[NumericFault]) -> None:
    calls: list[int] = []

    @resilient.train(tmp_path)
    def main(run: Run) -> None:
        run.track(state={"x": torch.zeros(1)})
        for _ in run.steps(range(200), total=200):
            calls.append(run.step)
            run.watch(grad_norm=0.1 if run.step < 50 else 0.6)

    main()
    assert 0 < len(told) < 64, "not for the rest of the training"
    assert len(calls) == 200 + len(told)


def test_gradients_of_earlier_turns_are_not_lost_by_a_rerun(tmp_path: Path, told: list[NumericFault]) -> None:
    @resilient.train(tmp_path, on_nonfinite="skip")
    def main(run: Run) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = resilient.ElasticSampler(40, 2, seed=0)
        run.track(model=model, optimizer=optimizer, data=sampler)
        for _ in run.steps(sampler, total=20):
            model(torch.ones(1, 1)).sum().backward()
            if run.step % 4 == 3:
                run.watch(loss=math.nan if run.step == 7 else 1.0)
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(FloatingPointError, match="in step 8, which could not be run again"):
        main()
    assert [(each.outcome, each.action, each.reruns) for each in told] == [("not run again", "stop", 0)]


def test_a_first_look_after_many_turns_without_one_needs_no_rerun_to_tell(
    tmp_path: Path, told: list[NumericFault]
) -> None:
    @resilient.train(tmp_path)
    def main(run: Run) -> None:
        run.track(state={"x": torch.zeros(1)})
        for _ in run.steps(range(9), total=9):
            if run.step == 5:
                run.watch(loss=math.nan)

    with pytest.raises(FloatingPointError, match="loss is not finite"):
        main()
    assert [each.outcome for each in told] == ["not run again"]
