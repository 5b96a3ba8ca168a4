"""Whether the state has changed, when each rank knows of its own part only."""

from __future__ import annotations

import pytest
import torch

from resilient.engine.handle import SaveHandle
from resilient.events import StateUnchanged
from resilient.state.capturer import Capturer
from resilient.state.wrappers import Shard
from resilient.store.memory import MemoryStore
from tests.engine.rank_threads import Rank, make_ranks

LENGTH = 600


class Training:
    """One of two ranks; its half of a tensor moves by so much in each step, and a counter by one."""

    def __init__(self, rank: Rank, move: float) -> None:
        part = LENGTH // 2
        self._rank = rank
        self._move = move
        self._shard = torch.zeros(part)
        self._counter = torch.zeros(1)
        shard = Shard(self._shard, "w", (LENGTH,), (rank.peers.rank * part,))
        items = {"m": {"w": shard, "counter": self._counter}}
        self._capturer = Capturer(items, rank=rank.peers.rank, world_size=2)

    def step(self, number: int) -> SaveHandle:
        self._shard += self._move
        self._counter += 1
        captured = self._capturer.capture()
        trained = tuple(at for at, leaf in enumerate(captured.tensors) if leaf.name == "w")
        assert trained
        return self._rank.saver.save(number, captured, reason="test", trained=trained)


@pytest.mark.parametrize(("moves", "alarms"), [((0, 0), 1), ((1, 0), 0), ((0, 1), 0), ((1, 1), 0)])
def test_only_what_has_changed_on_no_rank_is_an_alarm_and_rank_0_tells_it_once(
    moves: tuple[float, float], alarms: int
) -> None:
    ranks = make_ranks(MemoryStore(), 2)
    trainings = [Training(rank, move) for rank, move in zip(ranks, moves, strict=True)]
    for number in range(5):
        for handle in [each.step(number) for each in trainings]:
            handle.wait(60)
    for rank in ranks:
        rank.saver.close(30)
    told = [[event for event in rank.events if isinstance(event, StateUnchanged)] for rank in ranks]
    assert [len(each) for each in told] == [alarms, 0]
    assert all(event.since == event.step - 1 for event in told[0])
