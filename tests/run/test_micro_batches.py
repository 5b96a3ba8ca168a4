"""A step is the same step of the same global batch, in however many micro-batches a rank computes its part."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import resilient
from resilient.errors import UsageError
from resilient.run.micro_batches import MicroBatches, in_steps
from resilient.run.sampler import ElasticSampler


def turns(samplers: list[ElasticSampler]) -> Iterator[list[MicroBatches[list[int]]]]:
    """Yield what each rank gets in a turn, for one epoch."""
    drawn: list[Iterator[Any]] = [in_steps(iter(sampler), [sampler]) for sampler in samplers]
    for parts in zip(*drawn, strict=True):
        yield list(parts)
        for sampler in samplers:
            sampler.advance()


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 60), st.integers(7, 20), st.integers(1, 7), st.integers(1, 9), st.booleans())
def test_micro_batches_of_all_ranks_make_the_same_global_batches(
    length: int, global_batch: int, size: int, micro_batch: int, drop_last: bool
) -> None:
    drop_last = drop_last and length >= global_batch
    order: dict[str, Any] = {"length": length, "global_batch": global_batch, "seed": 1, "drop_last": drop_last}
    whole = list(ElasticSampler(**order, rank=0, world_size=1))
    samplers = [ElasticSampler(**order, micro_batch=micro_batch, rank=rank, world_size=size) for rank in range(size)]
    assert len({len(sampler) for sampler in samplers}) == 1
    pieces = 0
    for batch, parts in zip(whole, turns(samplers), strict=True):
        numbers = {sampler.accumulation for sampler in samplers} | {len(part) for part in parts}
        assert len(numbers) == 1, "a collective in each micro-batch would hang"
        assert numbers == {math.ceil(math.ceil(len(batch) / size) / micro_batch)}
        found, weights = [], 0.0
        for sampler, part in zip(samplers, parts, strict=True):
            for mine in part:
                assert 1 <= len(mine) <= micro_batch
                weights += sampler.loss_weight / size
                found += mine if sampler.loss_weight else []
                assert sampler.loss_weight in (0, pytest.approx(len(mine) * size / len(batch)))
        assert found == batch
        assert weights == pytest.approx(1)
        pieces += len(parts[0])
    assert pieces == len(samplers[0])


def train(place: Path, micro_batch: int | None, *, until: int, total: int) -> list[float]:
    """Train to ``until`` of ``total``; return the gradient's norm at each step."""
    norms = []

    @resilient.train(place, every=1)
    def main(run: resilient.Run) -> None:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(22, 5, dtype=torch.float64), torch.randn(22, 1, dtype=torch.float64))
        model = torch.nn.Linear(5, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = resilient.ElasticSampler(len(data), global_batch=8, seed=0, micro_batch=micro_batch)
        run.track(model=model, optimizer=optimizer, data=sampler)
        for batches in run.steps(DataLoader(data, batch_sampler=sampler), total=total):
            if micro_batch is None:
                assert run.accumulation == 1
                batches = [batches]  # noqa: PLW2901 -- the loop below is the same one
            assert (
                run.accumulation
                == len(batches)
                == (1 if micro_batch is None else math.ceil((8, 8, 6)[run.step % 3] / 3))
            )
            for inputs, targets in batches:
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                (loss * run.loss_weight).backward()  # type: ignore[no-untyped-call]  # torch's
            norms.append(sum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None))
            optimizer.step()
            optimizer.zero_grad()
            if run.step + 1 == until:
                break

    main()
    return norms


def test_a_step_of_micro_batches_is_the_step_of_the_whole_batch(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", None, until=7, total=7)
    assert train(tmp_path / "micro", 3, until=7, total=7) == pytest.approx(whole, rel=1e-9)


def test_a_restart_may_use_another_micro_batch(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", None, until=7, total=7)
    found = train(tmp_path / "run", 3, until=2, total=7)
    assert resilient.checkpoints(tmp_path / "run")[0].step == 2
    assert found + train(tmp_path / "run", None, until=7, total=7) == pytest.approx(whole, rel=1e-9)


def test_a_step_counts_once_and_is_not_saved_between_its_micro_batches(tmp_path: Path) -> None:
    @resilient.train(tmp_path, every=10)
    def main(run: resilient.Run) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = resilient.ElasticSampler(8, global_batch=4, seed=0, micro_batch=1)
        run.track(model=model, optimizer=optimizer, data=sampler)
        data: Any = sampler  # for type checkers a turn gets what the data yields
        for number, batches in enumerate(run.steps(data, total=3)):
            assert (run.step, len(batches)) == (number, 4)
            for batch in batches:
                model(torch.ones(len(batch), 1)).mean().backward()
                with pytest.raises(UsageError, match="not that of a step boundary"):
                    run.save()
                if number == 2:
                    break  # what is left of a step that the program gives up counts with it
            optimizer.step()
            optimizer.zero_grad()
        assert (run.step, sampler.epoch, sampler.consumed) == (3, 1, 4)

    main()


@pytest.mark.parametrize(
    ("data", "hint"),
    [(lambda _: range(5), "after 1 of 4"), (lambda sampler: list(sampler)[:6], "after 2 of 4")],
    ids=["other data", "cut"],
)
def test_data_that_ends_within_a_step_is_refused(data: Any, hint: str, tmp_path: Path) -> None:
    @resilient.train(tmp_path, every=10)
    def main(run: resilient.Run) -> None:
        sampler = resilient.ElasticSampler(8, global_batch=4, seed=0, micro_batch=1)
        run.track(state={"w": torch.zeros(1)}, data=sampler)
        with pytest.raises(UsageError, match=hint):
            list(run.steps(data(sampler), total=4))

    main()


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="micro_batch of an ElasticSampler is 0"):
        ElasticSampler(8, global_batch=4, seed=0, micro_batch=0)
    sampler = ElasticSampler(8, global_batch=4, seed=0, micro_batch=2, rank=0, world_size=1)
    with pytest.raises(UsageError, match="no micro-batch 2: there are 2"):
        sampler.take(2)
    other = ElasticSampler(8, global_batch=4, seed=0, micro_batch=1, rank=0, world_size=1)
    with pytest.raises(UsageError, match=r"differ in the micro-batches of a step: \[2, 4\]"):
        next(in_steps(iter(sampler), [sampler, other]))
    batches = MicroBatches([[1, 2], [3, 4]], [sampler])
    assert batches[-1] == [3, 4]
    with pytest.raises(TypeError, match="one by one"):
        batches[:1]
