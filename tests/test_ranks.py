"""The pool of ranks that other tests stand on."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import MAX_SIZE, RankError, RankPool, Ranks


def total(value: float) -> tuple[int, float]:
    tensor = torch.tensor(value + dist.get_rank())
    dist.all_reduce(tensor)
    return os.getpid(), tensor.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} had a bad day")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def dawdle_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


@pytest.mark.parametrize("size", [1, 2, MAX_SIZE])
def test_every_rank_answers_and_the_processes_stay(ranks: Ranks, size: int) -> None:
    first = ranks(size).run(total, 1.0)
    again: list[tuple[int, float]] = ranks(size).run("tests.test_ranks:total", 2.0)
    assert [value for _, value in first] == [size + size * (size - 1) / 2] * size
    assert [pid for pid, _ in first] == [pid for pid, _ in again] == ranks(size).pids()


def test_a_failing_rank_is_named_with_its_traceback_and_replaced(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 3: Traceback[\s\S]*fail_on[\s\S]*rank 1 had a bad day"):
        ranks(3).run(fail_on, 1)
    assert len(ranks(3).run(total, 0.0)) == 3


def test_a_killed_rank_is_an_error_not_a_hang(ranks: Ranks) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 0 of 2: died with exit code -9"):
        ranks(2).run(die_on, 0)
    assert time.monotonic() - began < 30
    assert len(ranks(2).run(total, 0.0)) == 2


def test_a_silent_rank_is_named_with_the_place_where_it_stands() -> None:
    with RankPool(2) as pool, pytest.raises(RankError, match=r"ranks \[1\] of 2 gave no answer[\s\S]*dawdle_on"):
        pool.run(dawdle_on, 1, timeout_s=1.0)
