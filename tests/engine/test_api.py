"""Saving by hand: what is refused before anything is written."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import resilient
from resilient.catalog.generations import claim_generation
from resilient.catalog.launch import Heartbeat
from resilient.catalog.line import read_line
from resilient.errors import ConflictError, CorruptError, ErrorKind, UsageError
from resilient.store.local import LocalStore
from resilient.store.memory import MemoryStore
from tests.engine.rank_threads import make_ranks

STATE = {"model": {"w": torch.ones(2)}}


@pytest.mark.parametrize("step", [-1, 10**12, True, 1.0, "7", None, np.float64(3), np.True_])
def test_a_step_that_is_no_number_of_steps_is_refused_and_nothing_is_written(tmp_path: Path, step: Any) -> None:
    with pytest.raises(UsageError, match="step") as caught:
        resilient.save(tmp_path / "run", step, STATE)
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [0, 10**12 - 1, np.int64(5), np.uint8(6)])
def test_every_other_step_is_saved_as_the_number_that_it_is(tmp_path: Path, step: Any) -> None:
    resilient.save(tmp_path, step, STATE).wait(30)
    assert [checkpoint.step for checkpoint in resilient.checkpoints(tmp_path)] == [int(step)]


def test_a_place_where_a_run_lives_takes_no_bare_save_and_the_run_goes_on(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    make_ranks(store, 1)
    claim_generation(store, world_size=1, launch="f" * 32, heartbeat=True)
    heartbeat = Heartbeat(store, "f" * 32)
    heartbeat.start()
    before = sorted(store.list("generations/"))
    try:
        with pytest.raises(ConflictError, match="in use by process") as caught:
            resilient.save(tmp_path, 1, STATE)
    finally:
        heartbeat.close()
    assert caught.value.kind is ErrorKind.RUN_IN_USE
    assert sorted(store.list("generations/")) == before
    resilient.save(tmp_path, 1, STATE).wait(30)  # it has ended
    assert [commit.step for commit in read_line(store).commits] == [1]


def test_a_module_without_a_name_is_refused_with_what_to_do(tmp_path: Path) -> None:
    model: Any = torch.nn.Linear(2, 2)
    resilient.save(tmp_path, 1, {"model": model}).wait(30)
    for call in (lambda: resilient.save(tmp_path, 2, model), lambda: resilient.load(tmp_path, model)):
        with pytest.raises(UsageError, match="not a Linear") as caught:
            call()
        assert '{"model": model}' in str(caught.value.hint)


def test_two_stores_of_one_url_are_two_places() -> None:
    first, second = MemoryStore(), MemoryStore()
    for step, store in enumerate((first, second), 1):
        resilient.save(store, step, {"s": {"w": torch.full((4,), float(step))}}).wait(30)
    assert [[each.step for each in resilient.checkpoints(store)] for store in (first, second)] == [[1], [2]]


class Noisy(MemoryStore):
    """A store that damages one byte of an answer, as often as it is told to."""

    damages = 0

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        super().read_into(key, start, into)
        if self.damages and key.startswith("data/"):
            self.damages -= 1
            into[-1] ^= 1


@pytest.mark.field_report("BR-139")
def test_bytes_that_were_damaged_on_their_way_are_read_again_twice() -> None:
    store = Noisy()
    resilient.save(store, 1, {"s": {"w": torch.arange(1000.0)}}).wait(30)
    store.damages = 2
    into = {"w": torch.zeros(1000)}
    resilient.load(store, {"s": into})
    assert torch.equal(into["w"], torch.arange(1000.0))
    store.damages = 3
    with pytest.raises(CorruptError, match="'w'"):
        resilient.load(store, {"s": into})


def test_a_forked_child_leaves_its_parents_writer_alone(tmp_path: Path) -> None:
    resilient.save(tmp_path / "run", 1, {"s": {"w": torch.zeros(4)}}).wait(60)
    child = multiprocessing.get_context("fork").Process(target=id, args=(0,))
    child.start()
    child.join(20)
    assert child.exitcode == 0
    resilient.save(tmp_path / "run", 2, {"s": {"w": torch.ones(4)}}).wait(60)
    assert [each.step for each in resilient.checkpoints(tmp_path / "run")] == [2, 1]


def test_a_save_cannot_be_called_back(tmp_path: Path) -> None:
    handle = resilient.save(tmp_path / "run", 1, {"s": {"w": torch.zeros(4)}})
    assert not handle.committed.cancel()
    handle.wait(60)


def test_a_wrong_setting_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIENT_COMPRESS", "zip")
    with pytest.raises(UsageError, match="RESILIENT_COMPRESS"):
        resilient.save(tmp_path / "run", 1, {"s": {"w": torch.zeros(4)}})
    assert not (tmp_path / "run").exists()


def test_steps_that_do_not_count_any_more_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    items = {"s": {"w": torch.zeros(4)}}
    for step in (1, 2, 3):
        resilient.save(tmp_path / "run", step, items).wait(60)
    resilient.load(tmp_path / "run", items, step=2)
    with caplog.at_level("INFO", "resilient"):
        resilient.save(tmp_path / "run", 9, items).wait(60)
    assert "continues from step 2" in caplog.text
    assert "steps up to 3" in caplog.text
    assert [each.step for each in resilient.checkpoints(tmp_path / "run")] == [9, 2, 1]
