from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from resilient.errors import ErrorKind, UsageError
from resilient.run.sampler import ElasticSampler


def parts(size: int, state: Mapping[str, int | bool] | None = None, **order: Any) -> list[ElasticSampler]:
    samplers = [ElasticSampler(**order, rank=rank, world_size=size) for rank in range(size)]
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
    return samplers


def steps(samplers: list[ElasticSampler]) -> Iterator[list[int]]:
    """Yield global batches for ever: what all ranks together use in one step, those with weight 0 left out."""
    while True:
        for locals_ in zip(*samplers, strict=True):
            assert all(locals_), "a rank got nothing"
            weights = [sampler.loss_weight for sampler in samplers]
            batch = [i for mine, weight in zip(locals_, weights, strict=True) if weight for i in mine]
            for mine, weight in zip(locals_, weights, strict=True):
                assert weight == pytest.approx(len(mine) * len(samplers) / len(batch) if weight else 0.0)
            yield batch
            for sampler in samplers:
                sampler.advance()


ORDERS = st.fixed_dictionaries(
    {
        "length": st.integers(1, 60),
        "global_batch": st.integers(6, 13),
        "seed": st.integers(0, 2**64 - 1),
        "shuffle": st.booleans(),
        "drop_last": st.booleans(),
    }
).filter(lambda order: not order["drop_last"] or order["length"] >= order["global_batch"])


@settings(max_examples=150, deadline=None)
@given(ORDERS, st.lists(st.tuples(st.integers(1, 6), st.integers(1, 12)), min_size=1, max_size=6))
@pytest.mark.field_report("BR-111", "BR-121", "BR-127")
def test_every_sample_exactly_once_in_the_same_order_across_restarts_and_sizes(
    order: dict[str, Any], lives: list[tuple[int, int]]
) -> None:
    total = sum(count for _, count in lives)
    whole = list(itertools.islice(steps(parts(1, **order)), total))
    seen, state = [], None
    for size, count in lives:
        samplers = parts(size, state, **order)
        drawn = steps(samplers)
        seen += [next(drawn) for _ in range(count)]
        for sampler in samplers:
            sampler.advance()  # the last batch of this life was used too; what was drawn beyond it was not
        states = [sampler.state_dict() for sampler in samplers]
        assert all(each == states[0] for each in states)
        state = states[0]
    assert seen == whole
    per_epoch = len(ElasticSampler(**order))
    for start in range(0, total - per_epoch + 1, per_epoch):
        epoch = [i for batch in whole[start : start + per_epoch] for i in batch]
        assert len(set(epoch)) == len(epoch)
        dropped = order["length"] % order["global_batch"] if order["drop_last"] else 0
        assert len(epoch) == order["length"] - dropped


def test_the_weighted_mean_over_the_ranks_is_the_mean_over_the_global_batch() -> None:
    losses = torch.arange(23, dtype=torch.float64).square()
    for size in range(1, 8):
        samplers = parts(size, length=23, global_batch=7, seed=3)
        for locals_ in zip(*samplers, strict=True):
            weighted = [s.loss_weight * losses[mine].mean() for s, mine in zip(samplers, locals_, strict=True)]
            batch = {i for s, mine in zip(samplers, locals_, strict=True) if s.loss_weight for i in mine}
            torch.testing.assert_close(sum(weighted) / size, losses[sorted(batch)].mean())
            for sampler in samplers:
                sampler.advance()


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.field_report("BR-114")
def test_batches_that_a_loader_drew_ahead_do_not_count(workers: int) -> None:
    sampler = ElasticSampler(30, global_batch=4, seed=0, rank=0, world_size=1)
    expected = list(sampler)
    loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers, prefetch_factor=4 if workers else None)
    for batch, wanted in zip(loader, expected[:3], strict=False):
        assert batch.tolist() == wanted
        sampler.advance()
    assert sampler.consumed == 12
    assert [batch.tolist() for batch in loader] == expected[3:]


@pytest.mark.field_report("BR-113")
def test_an_epoch_that_is_over_is_the_start_of_the_next() -> None:
    sampler = ElasticSampler(8, global_batch=4, seed=0, rank=0, world_size=1)
    first = list(sampler)
    sampler.advance()
    sampler.advance()
    assert (sampler.epoch, sampler.consumed) == (1, 0)
    assert sorted(i for batch in sampler for i in batch) == sorted(i for batch in first for i in batch) == [*range(8)]
    assert list(sampler) != first


def test_the_order_is_that_of_the_format() -> None:
    assert list(ElasticSampler(8, global_batch=8, seed=1, rank=0, world_size=1)) == [ORDER_OF_SEED_1]


ORDER_OF_SEED_1 = [3, 5, 2, 7, 0, 6, 1, 4]


def test_a_position_in_another_order_is_refused_with_every_difference() -> None:
    state = ElasticSampler(100, global_batch=10, seed=0).state_dict()
    with pytest.raises(UsageError) as caught:
        ElasticSampler(101, global_batch=12, seed=1).load_state_dict(state)
    assert caught.value.kind is ErrorKind.MISMATCH
    for words in ("length was 100, is 101", "global_batch was 10, is 12", "seed was 0, is 1"):
        assert words in str(caught.value)


def test_a_batch_that_cannot_feed_all_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot feed 5 ranks"):
        list(ElasticSampler(100, global_batch=4, seed=0, rank=0, world_size=5))


@pytest.mark.parametrize(
    "wrong", [{"length": 0}, {"global_batch": 0}, {"seed": -1}, {"rank": 0}, {"length": 3, "drop_last": 1}], ids=str
)
def test_what_makes_no_order_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        ElasticSampler(**{"length": 10, "global_batch": 5, "seed": 0, **wrong})  # type: ignore[arg-type]
