"""The position in the data: no sample lost, none repeated, found again at once, counted once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import resilient
from resilient.clock import SYSTEM_CLOCK
from resilient.run.sampler import ElasticSampler
from resilient.run.session import Run


class Stop(Exception):  # noqa: N818 -- it is no error
    """What ends a run in the middle, as a failure would."""


class Numbers(Dataset[int]):
    """The numbers themselves; remembers which were fetched in this process."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.fetched.append(index)
        return index


class Life:
    """A training over numbers: what it saw in each step, and the learning rate then."""

    def __init__(self, place: Path, length: int, batch: int, *, workers: int = 0, shuffle: bool = True) -> None:
        self.place = place
        self.numbers = Numbers(length)
        self.batch = batch
        self.workers = workers
        self.shuffle = shuffle
        self.seen: dict[int, list[int]] = {}
        self.rates: dict[int, float] = {}
        self.start = 0
        self.position = (0, 0)

    def __call__(
        self,
        total: int | None,
        before: Callable[[Run], None] = lambda run: None,
        after: Callable[[Run], None] = lambda run: None,
    ) -> Life:
        @resilient.train(self.place, every=1000)
        def main(run: Run) -> None:
            model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            sampler = ElasticSampler(len(self.numbers), self.batch, seed=7, shuffle=self.shuffle)
            run.track(model=model, optimizer=optimizer, scheduler=scheduler, data=sampler)
            self.start, self.position = run.step, (sampler.epoch, sampler.consumed)
            ahead = 2 if self.workers else None
            data: Any = DataLoader(self.numbers, batch_sampler=sampler, num_workers=self.workers, prefetch_factor=ahead)
            for batch in run.steps(data, total=total):
                before(run)
                self.seen[run.step] = batch.tolist()
                self.rates[run.step] = optimizer.param_groups[0]["lr"]
                optimizer.step()
                scheduler.step()
                after(run)

        main()
        return self


def stop_at(step: int) -> Callable[[Run], None]:
    def before(run: Run) -> None:
        if run.step == step:
            run.save().wait(30)
            raise Stop

    return before


def samples(life: Life) -> list[int]:
    return [number for _, batch in sorted(life.seen.items()) for number in batch]


@pytest.mark.field_report("BR-111")
def test_a_run_that_was_stopped_in_mid_epoch_has_seen_every_sample_once(tmp_path: Path) -> None:
    first, second = Life(tmp_path, 64, 4), Life(tmp_path, 64, 4)
    with pytest.raises(Stop):
        first(None, stop_at(5))
    second(None)
    assert samples(first) + samples(second) == samples(Life(tmp_path / "whole", 64, 4)(None))
    assert sorted(samples(first) + samples(second)) == [*range(64)]


@pytest.mark.field_report("BR-120")
def test_only_the_first_epoch_after_a_resume_is_short(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        Life(tmp_path, 10, 1)(30, stop_at(5))
    again = Life(tmp_path, 10, 1)(30)
    assert sorted(again.seen) == [*range(5, 30)]
    for epoch in (1, 2):
        assert sorted(samples(again)[epoch * 10 - 5 : epoch * 10 + 5]) == [*range(10)]


@pytest.mark.field_report("BR-114")
def test_a_position_that_is_saved_soon_after_a_resume_is_complete(tmp_path: Path) -> None:
    whole = samples(Life(tmp_path / "whole", 20, 1)(20))
    seen: list[int] = []
    for stop in (3, 5, 7):  # the workers have fetched further each time
        life = Life(tmp_path / "run", 20, 1, workers=2)
        with pytest.raises(Stop):
            life(20, stop_at(stop))
        seen += samples(life)
    last = Life(tmp_path / "run", 20, 1)(20)
    assert seen + samples(last) == whole
    assert sorted(whole) == [*range(20)]


@pytest.mark.field_report("BR-113", "BR-119")
def test_a_finished_run_that_is_extended_trains_whole_epochs_at_the_right_learning_rate(tmp_path: Path) -> None:
    whole = Life(tmp_path / "whole", 9, 1)(27)
    Life(tmp_path / "run", 9, 1)(18)
    extended = Life(tmp_path / "run", 9, 1)(27)
    assert extended.position == (2, 0), "the end of epoch 1 is the start of epoch 2"
    assert sorted(extended.seen) == [*range(18, 27)]
    assert sorted(samples(extended)) == [*range(9)]
    assert extended.rates == {step: rate for step, rate in whole.rates.items() if step >= 18}


@pytest.mark.parametrize("total", [12, 7, 3])
@pytest.mark.field_report("BR-225")
def test_a_run_that_is_past_its_planned_end_says_that_there_is_nothing_to_do(
    total: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "resilient")
    Life(tmp_path, 10, 1)(12)
    again = Life(tmp_path, 10, 1)(total)
    assert (again.seen, again.start) == ({}, 12)
    assert any(line.startswith("nothing to do") and "at step 12" in line for line in caplog.messages)


@pytest.mark.field_report("BR-226")
def test_what_belongs_to_a_completed_step_is_not_done_again(tmp_path: Path) -> None:
    evaluated: list[int] = []

    def evaluate(run: Run) -> None:
        if (run.step + 1) % 5 == 0:  # the step that this turn completes
            evaluated.append(run.step + 1)

    with pytest.raises(Stop):
        Life(tmp_path, 20, 1)(20, before=stop_at(10), after=evaluate)
    Life(tmp_path, 20, 1)(20, after=evaluate)
    assert evaluated == [5, 10, 15, 20]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.field_report("BR-123")
def test_samples_that_several_ranks_compute_together_count_once(replicas: int) -> None:
    parts = 2
    samplers = [
        ElasticSampler(100, 10, seed=0, rank=rank // replicas, world_size=parts) for rank in range(parts * replicas)
    ]
    for batches in zip(*samplers, strict=True):
        assert all(batch == batches[rank - rank % replicas] for rank, batch in enumerate(batches))
        assert len({number for batch in batches for number in batch}) == 10
        for sampler in samplers:
            sampler.advance()
            assert sampler.consumed % 10 == 0
        if samplers[0].epoch:
            break
    assert {(sampler.epoch, sampler.consumed) for sampler in samplers} == {(1, 0)}


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.field_report("BR-128")
def test_a_million_samples_are_skipped_without_fetching_them(shuffle: bool) -> None:
    numbers = Numbers(1_100_000)
    sampler = ElasticSampler(len(numbers), 100, seed=1, shuffle=shuffle, rank=0, world_size=1)
    sampler.load_state_dict({**sampler.state_dict(), "consumed": 1_000_000})
    started_s = SYSTEM_CLOCK.monotonic()
    batch = next(iter(DataLoader(numbers, batch_sampler=sampler)))
    assert SYSTEM_CLOCK.monotonic() - started_s < 10
    assert len(batch) == 100
    assert numbers.fetched == batch.tolist()
