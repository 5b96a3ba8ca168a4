"""What a save asks of a file system beside its bytes, and which thread waits for that."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from resilient.engine.handle import SaveHandle
from resilient.state.capture import capture
from resilient.store.local import TEMPORARY, LocalStore
from tests.engine.rank_threads import Rank, make_ranks


class Local(LocalStore):
    """A store that no other process can open: its writers are threads of this one, which the test can watch."""


def save(rank: Rank, step: int, value: float) -> SaveHandle:
    items = {"s": {"own": torch.full((40_000,), value), "all": torch.ones(40_000)}}
    return rank.saver.save(step, capture(items, rank=rank.peers.rank, world_size=rank.peers.world_size), reason="test")


def save_all(ranks: list[Rank], step: int) -> None:
    for handle in [save(rank, step, 1.0) for rank in ranks]:
        handle.wait(30)


@pytest.mark.field_report("BR-210")
@pytest.mark.parametrize("size", [1, 4])
def test_a_rank_makes_a_directory_once_and_those_of_its_attempt_only(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    mkdir = os.mkdir

    def record(path: os.PathLike[str], mode: int = 0o777) -> None:
        tried.append(os.fspath(path))
        mkdir(path, mode)

    ranks = make_ranks(Local(tmp_path / "run"), size)
    save_all(ranks, 1)  # makes those of the generation
    monkeypatch.setattr(os, "mkdir", record)
    for step in (2, 3, 4):
        save_all(ranks, step)
    assert max(Counter(tried).values()) <= size
    assert len(set(tried)) == 3 * 3, tried  # of the step, of the attempt, of its receipts


@pytest.mark.field_report("BR-212")
def test_a_slow_fsync_of_one_rank_is_waited_for_by_its_writer_alone_and_there_is_one_for_each_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = make_ranks(Local(tmp_path / "run"), 2)
    save_all(ranks, 1)
    may_go = threading.Event()
    synced: list[tuple[str, str]] = []
    fsync = os.fsync

    def slow(file: int) -> None:
        thread = threading.current_thread().name
        path = Path(f"/proc/self/fd/{file}").readlink()
        synced.append((thread, "a temporary file" if path.name.startswith(TEMPORARY) else str(path)))
        assert thread != "resilient-writer-1" or may_go.wait(30)
        fsync(file)

    monkeypatch.setattr(os, "fsync", slow)
    tensor = torch.ones(40_000)
    items = {"s": {"own": tensor}}
    handles = [rank.saver.save(2, capture(items, rank=n, world_size=2), reason="test") for n, rank in enumerate(ranks)]
    for handle in handles:
        handle.staged.result(10)
    tensor.fill_(2)  # training goes on
    handles[0].persisted.result(10)
    assert not any(handle.committed.done() for handle in handles)
    may_go.set()
    for handle in handles:
        handle.wait(30)
    assert {thread for thread, _ in synced} == {"resilient-writer-0", "resilient-writer-1"}
    folders = Counter(path for thread, path in synced if thread == "resilient-writer-1")
    assert folders.pop("a temporary file") == 2, "its data and its receipt"
    assert max(folders.values()) == 1
