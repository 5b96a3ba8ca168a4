"""The agent of torchelastic survives whoever dies: its store answers, and waits for nobody who is gone."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.utils import store as store_util

from resilient.clock import SYSTEM_CLOCK
from resilient.elastic.agent_store import ASSIGNED_RANKS, EXIT_BARRIER, ROLE_INFO, AgentStore


class Broken(dist.HashStore):
    """A store whose host is gone."""

    def set(self, *_: Any) -> None:
        raise dist.DistNetworkError("broken pipe")

    def check(self, *_: Any) -> bool:
        raise dist.DistNetworkError("broken pipe")


def wrapped(store: dist.Store, *, broken: bool = False, finished: list[bool] | None = None) -> AgentStore:
    return AgentStore(
        store,
        broken=lambda: broken,
        finish=lambda: None if finished is None else finished.append(True),
        workers=lambda _: None,
        clock=SYSTEM_CLOCK,
    )


class Spec:
    role = "default"
    local_world_size = 2


def assign(store: dist.Store, rank: int, size: int) -> list[tuple[int, int]]:
    workers = api.SimpleElasticAgent._assign_worker_ranks(None, store, rank, size, Spec())
    return [(worker.global_rank, worker.world_size) for worker in workers]


def test_ranks_are_handed_out_as_torchelastic_does() -> None:
    real = dist.HashStore()
    found: dict[int, list[tuple[int, int]]] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: found.update({rank: assign(wrapped(real), rank, 2)}))
        for rank in (1, 0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {0: [(0, 4), (1, 4)], 1: [(2, 4), (3, 4)]}


def test_the_names_are_those_of_torchelastic() -> None:
    assert api._TERMINAL_STATE_SYNC_ID == EXIT_BARRIER
    real = dist.HashStore()
    assign(real, 0, 1)
    assert real.check([f"{ROLE_INFO}0", f"{ASSIGNED_RANKS}0"])


@pytest.mark.parametrize("rank", [0, 1])
def test_with_a_member_gone_the_agent_goes_on_and_starts_workers_that_cannot_train_alone(rank: int) -> None:
    for store in (wrapped(dist.HashStore(), broken=True), wrapped(Broken(), broken=True)):
        workers = assign(store, rank, 2)
        assert [number for number, _ in workers] == [1, 2], "no rank 0 among them"
        assert {size for _, size in workers} == {3}


def test_the_exit_barrier_waits_for_those_who_live_and_not_through_the_key_value_server() -> None:
    finished: list[bool] = []
    store = wrapped(Broken(), finished=finished)
    store_util.barrier(store, 3, EXIT_BARRIER, barrier_timeout=300)
    assert finished == [True]


def test_a_value_that_nobody_sets_is_an_error_of_torch_after_its_timeout() -> None:
    store = wrapped(dist.HashStore())
    store.set_timeout(timedelta(seconds=0.2))
    assert store.timeout == timedelta(seconds=0.2)
    with pytest.raises(dist.DistStoreError, match="nobody has set 'x'"):
        store.get("x")


def test_other_calls_are_those_of_the_store() -> None:
    store = wrapped(dist.HashStore())
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.multi_get(["a", "b"]) == [b"1", b"2"]
    assert store.check(["a"])
    assert not store.check(["c"])
    assert store.add("n", 2) == 2
    store.wait(["a"])
    with pytest.raises(dist.DistStoreError, match="gone"):
        wrapped(dist.HashStore(), broken=True).get("x")
    assert json.loads(wrapped(dist.HashStore(), broken=True).get(f"{ROLE_INFO}3"))["rank"] == 3
