"""Which step is restored when the newest one on disk is not the newest good one, and what is said about it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from resilient.catalog.line import read_line
from resilient.catalog.prune import prune
from resilient.clock import SYSTEM_CLOCK
from resilient.engine.peers import Peers
from resilient.engine.restore import load_into, restore
from resilient.errors import ConflictError, CorruptError, ErrorKind, NotFoundError, UsageError
from resilient.events import Bus, Event, FellBack, Notice
from resilient.state.capture import capture
from resilient.state.wrappers import PerRank, Shard
from resilient.store.base import Store
from resilient.store.local import LocalStore
from tests.engine.rank_threads import Rank, make_ranks, on_ranks

LENGTH = 600


def items(step: float, rank: int = 0, size: int = 1) -> dict[str, Any]:
    """Return what a rank has at a step: its part of a tensor, and the position in the data."""
    part = LENGTH // size
    shard = Shard(torch.full((part,), float(step)), "w", (LENGTH,), (rank * part,))
    return {"model": {"part": shard}, "data": {"position": step, "seen": torch.tensor(float(step))}}


def save(ranks: Sequence[Rank], step: int) -> None:
    size = len(ranks)
    handles = [
        each.saver.save(step, capture(items(step, rank, size), rank=rank, world_size=size), reason="test")
        for rank, each in enumerate(ranks)
    ]
    for handle in handles:
        handle.wait(60)


def restored(store: Store, into: dict[str, Any], peers: Peers, *, strict: bool = True) -> tuple[int, list[Event]]:
    events: list[Event] = []
    bus = Bus()
    bus.subscribe(events.append)
    found = restore(store, into, peers, resume="auto", strict=strict, bus=bus, timeout_s=30)
    assert found is not None
    return found.commit.step, events


def state_of(into: dict[str, Any]) -> set[float]:
    """Return the steps that the parts of a state come from: one, if all is well."""
    return {*into["model"]["part"].tensor.tolist(), float(into["data"]["position"]), float(into["data"]["seen"])}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make a run of two ranks with the steps 10, 20 and 30."""
    ranks = make_ranks(LocalStore(tmp_path / "run"), 2)
    for step in (10, 20, 30):
        save(ranks, step)
    return tmp_path / "run"


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.mark.field_report("BR-003", "BR-007", "BR-009")
def test_what_was_begun_and_never_committed_is_passed_over(run: Path) -> None:
    attempt = only(run, "steps/*30/*")
    commit = attempt / "COMMIT"
    # Killed between writing COMMIT under a temporary name and publishing it, when all else is there.
    commit.rename(attempt / ".tmp-4711-00112233")
    store, into = LocalStore(run), items(0)
    assert restored(store, into, Peers.current())[0] == 20
    assert state_of(into) == {20}
    # Killed earlier: data without any document of the step.
    shutil.rmtree(attempt.parent)
    into = items(0)
    assert restored(store, into, Peers.current())[0] == 20
    assert state_of(into) == {20}


@pytest.mark.field_report("BR-003")
def test_the_next_life_saves_over_what_was_never_committed_and_that_is_collected(run: Path) -> None:
    old = only(run, "steps/*30/*")
    (old / "COMMIT").unlink()
    store = LocalStore(run)
    (rank,) = make_ranks(store, 1, continues=read_line(store).commits[0])
    save([rank], 30)
    line = read_line(store)
    assert [commit.step for commit in line.commits] == [30, 20, 10]
    assert line.commits[0].generation == 2
    for _ in range(2):  # what is deleted goes in two passes
        prune(store, read_line(store), frozenset({10, 20, 30}), clock=SYSTEM_CLOCK)
    assert not list(run.glob(f"data/*/{old.name}/000000000030-*")), "the bytes of the dead save are still there"
    into = items(0)
    assert restored(store, into, Peers.current())[0] == 30
    assert state_of(into) == {30}


@pytest.mark.field_report("BR-008")
def test_the_order_is_that_of_the_steps_whatever_the_times_of_the_files_say(run: Path) -> None:
    for number, step in enumerate((30, 20, 10)):  # the oldest step has the newest files
        for path in [*run.glob(f"steps/*{step}"), *run.glob(f"steps/*{step}/**/*")]:
            os.utime(path, (1_900_000_000 + number, 1_900_000_000 + number))
    into = items(0)
    assert restored(LocalStore(run), into, Peers.current())[0] == 30
    assert state_of(into) == {30}


@pytest.mark.field_report("BR-012", "BR-125")
def test_one_damaged_shard_takes_every_rank_back_one_step_with_all_items(run: Path) -> None:
    damage_shard_of_rank_1(run)

    def work(peers: Peers) -> object:
        into = items(0, peers.rank, 2)
        step, events = restored(LocalStore(run), into, peers)
        return step, state_of(into), [event.step for event in events if isinstance(event, FellBack)]

    assert on_ranks(2, work) == [(20, {20}, [30])] * 2


@pytest.mark.field_report("BR-012")
def test_an_explicit_step_with_a_damaged_shard_stops_every_rank_with_the_same_error(run: Path) -> None:
    victim = damage_shard_of_rank_1(run)

    def work(peers: Peers) -> object:
        store = LocalStore(run)
        return load_into(store, items(0, peers.rank, 2), peers, read_line(store).at(30), bus=Bus(), timeout_s=30)

    errors = on_ranks(2, work)
    assert all(isinstance(error, CorruptError) and error.rank == 1 for error in errors)
    assert str(errors[0]) == str(errors[1])
    assert str(victim.relative_to(run)) in str(errors[0])


def damage_shard_of_rank_1(run: Path) -> Path:
    victim = only(run, "data/*/*/000000000030-000001-0")
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    return victim


@pytest.mark.field_report("BR-002")
def test_a_step_that_lacks_a_part_is_not_committed_and_the_part_is_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    ranks = make_ranks(store, 2)

    def state(step: int, rank: int, *, whole: bool) -> dict[str, Any]:
        position = {"data": PerRank({"position": torch.tensor(step + rank)})}
        return {"model": {"w": torch.full((3,), float(step))}, **(position if whole or rank == 0 else {})}

    for step, whole in ((20, True), (30, False)):
        handles = [
            each.saver.save(step, capture(state(step, rank, whole=whole), rank=rank, world_size=2), reason="test")
            for rank, each in enumerate(ranks)
        ]
        for handle in handles:
            if whole:
                handle.wait(60)
            else:
                with pytest.raises(ConflictError, match=r"data.*rank 1|rank 1.*data") as caught:
                    handle.wait(60)
                assert caught.value.kind is ErrorKind.INCOMPLETE
    into = state(0, 0, whole=True)
    assert on_ranks(2, lambda peers: restored(store, state(0, peers.rank, whole=True), peers)[0]) == [20, 20]
    with pytest.raises(NotFoundError, match="30"):
        load_into(store, into, Peers.current(), read_line(store).at(30), bus=Bus())


@pytest.mark.field_report("BR-081", "BR-084")
def test_what_is_saved_and_not_wanted_any_more_is_named_and_left_out_only_when_told(run: Path) -> None:
    into = items(0)
    del into["data"]
    with pytest.raises(UsageError, match="data") as caught:
        restored(LocalStore(run), into, Peers.current())
    assert caught.value.kind is ErrorKind.MISMATCH
    assert not into["model"]["part"].tensor.any()
    step, events = restored(LocalStore(run), into, Peers.current(), strict=False)
    assert step == 30
    assert any("data" in event.message for event in events if isinstance(event, Notice))


@pytest.mark.field_report("BR-026")
def test_a_run_that_was_copied_with_its_directory_restores(run: Path) -> None:
    copied = run.with_name("copied")
    assert not [each for each in run.rglob("*") if each.is_symlink()]
    shutil.copytree(run, copied)  # as cp -r: new times, new inodes
    shutil.rmtree(run)
    into = items(0)
    assert restored(LocalStore(copied), into, Peers.current())[0] == 30
    assert state_of(into) == {30}
    store = LocalStore(copied)
    (rank,) = make_ranks(store, 1, continues=read_line(store).commits[0])
    save([rank], 40)
    assert [commit.step for commit in read_line(store).commits] == [40, 30, 20, 10]


class Local(LocalStore):
    """A store that no other process can open: its writers are threads of this one, which the test can disturb."""


@pytest.mark.field_report("BR-023")
def test_a_rename_that_is_a_copy_and_ends_half_way_leaves_the_old_or_the_new_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.replace
    left = 0

    def copy(self: Path, target: Path) -> Path:
        nonlocal left
        assert not self.is_dir(), "a directory is renamed"
        left -= 1
        if left >= 0:
            return rename(self, target)
        if left == -1:
            target.write_bytes(self.read_bytes()[: self.stat().st_size // 2])
        raise OSError(errno.ENOTCONN, "the mount is gone")  # and nothing more is written by this life

    newest = []
    for number in range(20):
        place = tmp_path / str(number)
        (rank,) = make_ranks(Local(place), 1)
        save([rank], 10)
        left = number
        monkeypatch.setattr(Path, "replace", copy)
        handle = rank.saver.save(20, capture(items(20), rank=0, world_size=1), reason="test")
        error = handle.committed.exception(60)
        rank.saver.close(30)
        monkeypatch.undo()
        into = items(0)
        step, _ = restored(LocalStore(place), into, Peers.current())
        assert state_of(into) == {step}
        assert step == 20 or error is not None, "it was reported as committed"
        newest.append(step)
        if left >= 0:
            break
    assert newest[0] == 10
    assert newest[-1] == 20
    assert len(newest) >= 3, "data, receipt or manifest"


def tensors(step: float, *names: str) -> dict[str, Any]:
    return {"model": {name: torch.full((LENGTH,), float(step)) for name in names}}


@pytest.mark.parametrize("with_third", [False, True])
def test_falling_back_leaves_no_value_of_the_damaged_step(tmp_path: Path, *, with_third: bool) -> None:
    """What only the damaged step has may be overwritten already: an older step without it is then not usable."""
    store = LocalStore(tmp_path / "run")
    (rank,) = make_ranks(store, 1)
    saves = [(10, ("a", "z")), (20, ("a",)), (30, ("a", "z"))] if with_third else [(20, ("a",)), (30, ("a", "z"))]
    for step, names in saves:
        captured = capture(tensors(step, *names), rank=0, world_size=1)
        rank.saver.save(step, captured, reason="test").wait(30)
    victim = only(tmp_path / "run", "data/*/*/000000000030-000000-0")
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    into = tensors(0, "a", "z")
    if with_third:
        step, events = restored(store, into, Peers.current(), strict=False)
        assert step == 10
        assert {float(value) for each in into["model"].values() for value in each} == {10.0}
        assert any("lacks model.z" in event.why for event in events if isinstance(event, FellBack))
    else:
        with pytest.raises(CorruptError, match=r"step 20: it lacks model\.z") as caught:
            restored(store, into, Peers.current(), strict=False)
        assert caught.value.kind is ErrorKind.NOTHING_USABLE


def test_a_start_that_continued_what_is_lost_now_is_no_fresh_start(run: Path) -> None:
    store = LocalStore(run)
    make_ranks(store, 1, continues=read_line(store).commits[0])
    for commit in run.glob("steps/*/*/COMMIT"):
        commit.unlink()
    into = items(0)
    with pytest.raises(CorruptError, match="continues step 30"):
        restore(store, into, Peers.current(), resume="auto", bus=Bus())
