"""A save holds no collective open, and a rank that fails or stands still costs the others a bounded time."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import resilient
from resilient.catalog.line import read_line
from resilient.clock import SYSTEM_CLOCK
from resilient.engine.save_settings import SaveSettings
from resilient.errors import ErrorKind, PeerError, StoreError
from resilient.format.digest import BytesLike
from resilient.state.capture import capture
from resilient.store.memory import MemoryStore
from tests.engine.rank_threads import Rank, make_ranks
from tests.lives import Life
from tests.ranks import Ranks


class Troubled(MemoryStore):
    """A store that calls ``before`` with every key that is written."""

    before: Callable[[str], object] = staticmethod(lambda key: None)

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        self.before(key)
        super().put(key, parts)

    def create(self, key: str, data: bytes) -> bool:
        self.before(key)
        return super().create(key, data)


def save_on(rank: Rank, step: int) -> resilient.SaveHandle:
    tree = {"s": {"big": torch.full((5000,), float(step)), "own": torch.ones(3)}}
    return rank.saver.save(step, capture(tree, rank=rank.peers.rank, world_size=rank.peers.world_size), reason="test")


@pytest.mark.parametrize("phase", ["capture", "copy", "data", "receipt"])
@pytest.mark.field_report("BR-053")
def test_the_failure_of_one_rank_reaches_the_others_at_once_and_the_next_save_works(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Troubled()
    ranks = make_ranks(store, 3, SaveSettings(agree_timeout_s=0.5))  # the deadline of a commit is ten minutes
    for handle in [save_on(rank, 1) for rank in ranks]:
        handle.wait(60)
    broken = StoreError("the disk of this node is full", kind=ErrorKind.NO_SPACE)

    def fail(*_: object, **__: object) -> Any:
        raise broken

    def refuse(key: str) -> None:
        if re.fullmatch({"data": "data/.*-000001-0", "receipt": ".*/receipts/000001"}.get(phase, "nothing"), key):
            raise broken

    if phase == "copy":
        monkeypatch.setattr(ranks[1].saver._stager, "stage", fail)
    store.before = refuse
    started_s = SYSTEM_CLOCK.monotonic()
    second = ranks[1].saver.refuse(2, broken) if phase == "capture" else save_on(ranks[1], 2)
    handles = [save_on(ranks[0], 2), second, save_on(ranks[2], 2)]
    with pytest.raises(StoreError, match="is full"):
        handles[1].wait(30)
    for handle in (handles[0], handles[2]):
        with pytest.raises(PeerError, match=r"rank 1: .*the disk of this node is full"):
            handle.wait(30)
    assert SYSTEM_CLOCK.monotonic() - started_s < 30
    monkeypatch.undo()
    store.before = lambda key: None
    for handle in [save_on(rank, 3) for rank in ranks]:
        handle.wait(60)
    assert [commit.step for commit in read_line(store).commits] == [3, 1]


@pytest.mark.field_report("BR-055")
def test_waiting_for_a_save_is_no_collective() -> None:
    ranks = make_ranks(MemoryStore(), 2)
    first, second = (save_on(rank, 1) for rank in ranks)
    first.wait(60)  # by rank 0 alone
    for handle in (save_on(rank, 2) for rank in ranks):
        handle.staged.result(10)
    assert second.committed.result(60) == 1


@pytest.mark.field_report("BR-060")
def test_a_store_that_stands_still_is_waited_for_only_so_long_and_the_handle_shows_where_it_stands() -> None:
    store = Troubled()
    (rank,) = make_ranks(store, 1)
    go_on = threading.Event()
    store.before = lambda key: go_on.wait(60)
    handle = save_on(rank, 1)
    started_s = SYSTEM_CLOCK.monotonic()
    assert not rank.saver.drain(0.2)
    with pytest.raises(StoreError, match="its own bytes are not yet durable") as caught:
        handle.wait(0.2)
    assert caught.value.kind is ErrorKind.DEADLINE
    assert SYSTEM_CLOCK.monotonic() - started_s < 10
    assert rank.saver.busy
    assert "staged" in repr(handle)
    go_on.set()
    handle.wait(60)
    assert rank.saver.drain(30)


def collectives_of_saves(place: str) -> list[int]:
    """Return how many collectives the process group had seen before and after each of three saves."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    found = []
    group: Any = dist.group.WORLD  # what counts its collectives has no public name
    for step in (1, 2, 3):
        found.append(group._get_sequence_number_for_group())
        resilient.save(place, step, {"model": model, "optimizer": optimizer, "own": {"plain": torch.ones(2)}}).wait(60)
        found.append(group._get_sequence_number_for_group())
    return found


@pytest.mark.field_report("BR-059")
def test_a_save_makes_no_collective(ranks: Ranks, tmp_path: Path) -> None:
    for counts in ranks(2).run(collectives_of_saves, str(tmp_path)):
        assert len(set(counts)) == 1, counts
        assert counts[0] > 0, "this does not count collectives"


COLLECTIVE_TIMEOUT_S = 3.0
WRITE_S = 2 * COLLECTIVE_TIMEOUT_S
STEP_S = 0.05


def train_beside_a_slow_write(place: str) -> None:
    from resilient.store.local import LocalStore

    class Slow(LocalStore):
        def put(self, key: str, parts: Sequence[BytesLike]) -> None:
            if key.startswith("data/") and os.environ["RANK"] == "0":
                time.sleep(WRITE_S)
            super().put(key, parts)

    dist.init_process_group("gloo")
    training = dist.new_group(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    state = {"w": torch.zeros(50_000)}
    handle = resilient.save(Slow(place), 1, {"state": state})
    dist.barrier()
    steps = 0
    going = torch.ones(1)
    while going.item():
        going.fill_(float(not handle.committed.done()))
        dist.all_reduce(going, op=dist.ReduceOp.MAX, group=training)
        state["w"].add_(1)
        steps += 1
        time.sleep(STEP_S)
    handle.wait(1)
    assert steps > WRITE_S / STEP_S / 4, f"training stood still: {steps} steps"


@pytest.mark.field_report("BR-052")
def test_training_goes_on_while_one_rank_writes_for_longer_than_a_collective_may_take(tmp_path: Path) -> None:
    Life(2, tmp_path / "life", train_beside_a_slow_write, str(tmp_path / "run")).succeed(90)
    assert [found.step for found in resilient.checkpoints(tmp_path / "run")] == [1]
    assert not resilient.checkpoints(tmp_path / "run")[0].tensor("w").any(), "the state at the boundary is what counts"
