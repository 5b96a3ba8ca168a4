"""Saves of several ranks: written once, committed whole or not at all, never silent when they fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import pytest
import torch

from resilient.catalog.contents import read_manifest
from resilient.catalog.line import read_line
from resilient.engine import placement
from resilient.engine.handle import SaveHandle
from resilient.engine.peers import Peers
from resilient.engine.restore import load_into
from resilient.engine.save_settings import SaveSettings
from resilient.errors import ConflictError, ErrorKind, PeerError, StoreError
from resilient.events import Bus, SaveCommitted, SaveFailed
from resilient.format.digest import BytesLike
from resilient.policy.keep import Keep
from resilient.state.capture import capture
from resilient.store.memory import MemoryStore
from tests.engine.rank_threads import Rank, make_ranks

CHUNK = 1 << 12


def state(value: float) -> dict[str, object]:
    return {"big": torch.full((5000,), float(value)), "small": torch.full((3,), float(value)), "values": {"lr": value}}


def save_all(ranks: Sequence[Rank], step: int, items: Sequence[Mapping[str, object]]) -> list[SaveHandle]:
    handles = []
    for rank, mine in zip(ranks, items, strict=True):
        captured = capture(mine, rank=rank.peers.rank, world_size=rank.peers.world_size)
        handles.append(rank.saver.save(step, captured, reason="test"))
    return handles


def loaded(store: MemoryStore, step: int, into: dict[str, object]) -> dict[str, object]:
    load_into(store, {"s": into}, Peers.current(), read_line(store).at(step), bus=Bus())
    return into


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def test_replicated_bytes_are_written_once_and_shared_out(store: MemoryStore) -> None:
    ranks = make_ranks(store, 4, SaveSettings(chunk_nbytes=CHUNK))
    for step in (1, 2):
        for handle in save_all(ranks, step, [{"s": state(step)}] * 4):
            handle.wait(30)
        commit = read_line(store).at(step)
        assert commit.nbytes == 5003 * 4
        stored = [each.nbytes for each in read_manifest(store, commit).objects]
        assert len(stored) == 4
        assert max(stored) < 2 * min(stored), "no rank stores much more than another"
        assert torch.equal(loaded(store, step, state(0.0))["big"], torch.full((5000,), float(step)))  # type: ignore[arg-type]


@pytest.mark.field_report("BR-036")
def test_what_is_saved_is_the_state_at_the_boundary(store: MemoryStore) -> None:
    (rank,) = make_ranks(store, 1)
    big, values = torch.full((5000,), 1.0), {"lr": 1.0}
    (handle,) = save_all([rank], 1, [{"s": {"big": big, "small": torch.zeros(3), "values": values}}])
    big.add_(1)  # right after the boundary, before anything is written
    values["lr"] = 5.0
    handle.wait(30)
    back = loaded(store, 1, state(0.0))
    assert torch.equal(back["big"], torch.full((5000,), 1.0))  # type: ignore[arg-type]
    assert back["values"] == {"lr": 1.0}


def test_ranks_may_hold_different_tensors(store: MemoryStore) -> None:
    ranks = make_ranks(store, 2)
    parts = [{"s": {f"layer{rank}": torch.full((10,), float(rank))}} for rank in range(2)]
    for handle in save_all(ranks, 1, parts):
        handle.wait(60)
    back = loaded(store, 1, {"layer0": torch.zeros(10), "layer1": torch.zeros(10)})
    assert torch.equal(back["layer1"], torch.ones(10))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["big", "small", "values"])
def test_different_values_under_one_name_are_refused_by_name_and_the_next_save_works(
    store: MemoryStore, name: str
) -> None:
    ranks = make_ranks(store, 2, SaveSettings(chunk_nbytes=CHUNK))
    divergent = state(1.0)
    divergent[name] = state(2.0)[name]
    for handle in save_all(ranks, 1, [{"s": state(1.0)}, {"s": divergent}]):
        with pytest.raises(ConflictError, match=name) as caught:
            handle.wait(60)
        assert caught.value.kind == ErrorKind.DIVERGENT
        assert "per_rank" in str(caught.value.hint) or "PerRank" in str(caught.value.hint)
    assert read_line(store).commits == ()
    for handle in save_all(ranks, 2, [{"s": state(1.0)}] * 2):
        handle.wait(60)
    assert [commit.step for commit in read_line(store).commits] == [2]


@pytest.mark.field_report("BR-056")
def test_a_rank_that_does_not_save_is_named(store: MemoryStore) -> None:
    ranks = make_ranks(store, 3, SaveSettings(commit_timeout_s=1.0, agree_timeout_s=0.5))
    handles = save_all(ranks[:2], 1, [{"s": {"w": torch.zeros(1)}}] * 2)
    with pytest.raises(PeerError, match="rank 2"):
        handles[0].wait(90)
    assert read_line(store).commits == ()


@pytest.mark.field_report("BR-009")
def test_the_death_of_rank_0_after_its_receipt_does_not_prevent_the_commit(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = make_ranks(store, 2)
    committer = ranks[0].saver._writers._link._serving._worker._committer  # type: ignore[attr-defined]

    def die(*_: object) -> None:
        raise RuntimeError("dead")

    monkeypatch.setattr(committer, "commit", die)
    first, second = save_all(ranks, 1, [{"s": {"w": torch.zeros(1)}}] * 2)
    second.wait(60)
    (commit,) = read_line(store).commits
    assert commit.committer == 1
    assert not first.committed.done() or first.committed.exception()


class SlowData(MemoryStore):
    """A store where data take their time and small objects pass them; ``early``: data missing when a COMMIT came."""

    def __init__(self) -> None:
        super().__init__()
        self.on_their_way: set[str] = set()
        self.early: list[set[str]] = []

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        if key.startswith("data/"):
            self.on_their_way.add(key)
            time.sleep(0.3)
        super().put(key, parts)
        self.on_their_way.discard(key)

    def create(self, key: str, data: bytes) -> bool:
        if key.endswith("COMMIT"):
            self.early.append(set(self.on_their_way))
            assert len(list(self.list("data/"))) == 3
        return super().create(key, data)


@pytest.mark.field_report("BR-024")
def test_a_commit_is_written_when_the_data_of_all_ranks_are_there() -> None:
    store = SlowData()
    ranks = make_ranks(store, 3)
    for handle in save_all(ranks, 1, [{"s": {f"of {rank}": torch.ones(500)}} for rank in range(3)]):
        handle.wait(60)
    assert store.early
    assert not any(store.early)


class Refusing(MemoryStore):
    """A store that refuses data while told to."""

    refusing = False

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        if self.refusing and key.startswith("data/"):
            raise StoreError(f"no space for {key}", kind=ErrorKind.NO_SPACE)
        super().put(key, parts)


@pytest.mark.field_report("BR-044", "BR-051")
def test_a_failing_save_never_hurts_training_and_is_never_silent() -> None:
    store = Refusing()
    (rank,) = make_ranks(store, 1)
    for step in range(1, 5):
        store.refusing = step in (2, 3)
        (handle,) = save_all([rank], step, [{"s": state(step)}])
        if store.refusing:
            with pytest.raises(StoreError, match="no space"):
                handle.wait(30)
            assert rank.saver.failures == step - 1
        else:
            handle.wait(30)
            assert rank.saver.failures == 0
    assert [commit.step for commit in read_line(store).commits] == [4, 1]
    assert [event.step for event in rank.events if isinstance(event, SaveFailed)] == [2, 3]
    assert [event.step for event in rank.events if isinstance(event, SaveCommitted)] == [1, 4]


class Hanging(MemoryStore):
    """A store whose data objects take as long as the test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        if key.startswith("data/"):
            assert self.go_on.wait(60)
        super().put(key, parts)


@pytest.mark.field_report("BR-042")
def test_two_steps_are_never_mixed_when_a_save_outlives_its_deadline() -> None:
    store = Hanging()
    (rank,) = make_ranks(store, 1, SaveSettings(commit_timeout_s=0.3, staging_slots=1))
    (slow,) = save_all([rank], 1, [{"s": state(1)}])
    (refused,) = save_all([rank], 2, [{"s": state(2)}])
    with pytest.raises(StoreError, match="still not over"):
        refused.wait(5)
    store.go_on.set()
    slow.wait(30)
    assert [commit.step for commit in read_line(store).commits] == [1]
    assert torch.equal(loaded(store, 1, state(0.0))["big"], torch.full((5000,), 1.0))  # type: ignore[arg-type]


def test_a_step_is_tried_once_by_a_generation(store: MemoryStore) -> None:
    (rank,) = make_ranks(store, 1)
    save_all([rank], 1, [{"s": state(1)}])[0].wait(30)
    with pytest.raises(ConflictError, match="step 1"):
        save_all([rank], 1, [{"s": state(1)}])


def test_retention_keeps_the_last_and_frees_the_rest(store: MemoryStore) -> None:
    (rank,) = make_ranks(store, 1, SaveSettings(keep=Keep(last=2)))
    for step in range(1, 7):
        save_all([rank], step, [{"s": state(step)}])[0].wait(30)
    assert rank.saver.drain(30)
    assert [commit.step for commit in read_line(store).commits] == [6, 5]
    assert len(list(store.list("data/"))) <= 3, "data of pruned steps goes at the latest one save later"


def test_a_commit_that_a_newer_launch_has_outdated_is_a_failed_save(store: MemoryStore) -> None:
    (rank,) = make_ranks(store, 1)
    save_all([rank], 1, [{"s": state(1)}])[0].wait(30)
    make_ranks(store, 1, continues=read_line(store).at(1))
    (handle,) = save_all([rank], 2, [{"s": state(2)}])
    with pytest.raises(ConflictError, match="generation 2 has taken over") as caught:
        handle.wait(30)
    assert caught.value.kind is ErrorKind.TAKEN_OVER
    assert (rank.saver.newest_committed, rank.saver.failures) == (1, 1)


@pytest.mark.parametrize("victim", ["run.json", "generations/", ""])
def test_a_save_into_a_run_whose_documents_were_deleted_fails_and_names_them(store: MemoryStore, victim: str) -> None:
    (rank,) = make_ranks(store, 1)
    save_all([rank], 1, [{"s": state(1)}])[0].wait(30)
    for key in list(store.list("")):
        if key.startswith(victim):
            store.delete(key)
    (handle,) = save_all([rank], 2, [{"s": state(2)}])
    with pytest.raises(StoreError, match=victim or "generations/") as caught:
        handle.wait(30)
    assert caught.value.kind is ErrorKind.SAVE_FAILED
    assert rank.saver.newest_committed == 1


@pytest.mark.field_report("BR-041")
def test_a_save_costs_the_same_after_many_others() -> None:
    class Counting(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def get(self, key: str) -> bytes:
            self.calls.append(f"get {key}")
            return super().get(key)

        def size(self, key: str) -> int:
            self.calls.append(f"size {key}")
            return super().size(key)

        def list(self, prefix: str) -> Iterator[str]:
            self.calls.append(f"list {prefix}")
            return super().list(prefix)

    store = Counting()
    (rank,) = make_ranks(store, 1)
    costs = []
    for step in range(1, 21):
        store.calls.clear()
        save_all([rank], step, [{"s": state(step)}])[0].wait(30)
        costs.append(len(store.calls))
        assert not [call for call in store.calls if call.startswith("list ") and call != "list generations/"]
    assert set(costs) == {costs[0]}, "it must not depend on how many were saved before"
    assert costs[0] <= 12, store.calls


class Small(MemoryStore):
    """A store with room for so many bytes of data."""

    room = 0

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        if key.startswith("data/"):
            used = sum(self.size(each) for each in self.list("data/"))
            if used + sum(map(len, parts)) > self.room:
                raise StoreError(f"no space for {key}", kind=ErrorKind.NO_SPACE)
        super().put(key, parts)


@pytest.mark.field_report("BR-044")
@pytest.mark.parametrize("size", [1, 2])
def test_a_full_disk_recovers_by_what_retention_and_failed_saves_give_back(size: int) -> None:
    """Two are kept and there is room for three and a half: what is given up stays until the next save, or failure."""
    store = Small()
    store.room = int(3.5 * 4 * 5003)
    ranks = make_ranks(store, size, SaveSettings(keep=Keep(last=2)))
    outcomes = []
    for step in range(1, 13):
        errors = []
        for handle in save_all(ranks, step, [{"s": state(step)}] * size):
            try:
                handle.wait(60)
            except (StoreError, PeerError) as error:
                errors.append(error)
        assert all(rank.saver.drain(30) for rank in ranks)
        outcomes.append(not errors)
    assert not all(outcomes), "the test wants a disk that is full at times"
    assert outcomes.count(True) >= 6
    assert not any(not one and not following for one, following in pairwise(outcomes)), outcomes
    kept = {commit.step for commit in read_line(store).commits}
    assert len(kept) == 2
    for step, good in enumerate(outcomes[:-1], 1):  # of the last one, a rank that succeeded leaves its part
        assert good or not [key for key in store.list("data/") if f"/{step:012d}-" in key], f"step {step} is left"


def test_a_rank_that_cannot_write_all_its_data_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MAX_OBJECT_NBYTES", CHUNK)
    store = Small()
    store.room = 3 * CHUNK
    (rank,) = make_ranks(store, 1, SaveSettings(chunk_nbytes=CHUNK))
    (handle,) = save_all([rank], 1, [{"s": state(1)}])
    with pytest.raises(StoreError, match="no space"):
        handle.wait(30)
    assert list(store.list("data/")) == []
    assert [key.rpartition("/")[2] for key in store.list("steps/")] == ["TOMBSTONE"]
