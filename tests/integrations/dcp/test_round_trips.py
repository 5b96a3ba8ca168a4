"""What DCP proves of its own file system, proven of our writer and reader (described, not copied)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import resilient
from resilient.integrations.dcp import StorageReader, StorageWriter
from tests.integrations.dcp import shards
from tests.ranks import Ranks, cpu_mesh

WORLDS = [2, 4]
SPECS: list[shards.Spec] = [
    ("w", (12, 6), "float32", (0,)),
    ("uneven", (7, 3), "bfloat16", (0,)),
    ("columns", (4, 10), "int16", (1,)),
    ("fewer rows than ranks", (1, 5), "float64", (0,)),
    ("replica", (3, 3), "complex64", (None,)),
    ("nothing", (0, 4), "float32", (0,)),
    ("eighths", (9,), "float8_e4m3fn", (0,)),
]


@pytest.mark.parametrize("size", WORLDS)
def test_every_layout_loads_into_every_other(tmp_path: Path, ranks: Ranks, size: int) -> None:
    assert ranks(size).run(shards.every_pair_of_cuts, str(tmp_path)) == [[]] * size


@pytest.mark.parametrize("size", WORLDS)
def test_sharded_loads_into_plain_and_back(tmp_path: Path, ranks: Ranks, size: int) -> None:
    assert ranks(size).run(shards.sharded_and_plain, str(tmp_path)) == [[True, True]] * size


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.field_report("BR-102")
def test_values_come_back_and_replace_those_that_are_there(tmp_path: Path, ranks: Ranks, size: int) -> None:
    expected = {"list": [1], "text": "string", "rank": {"deep": {"er": (1, 2.5, None)}}, "step": 7}
    assert ranks(size).run(shards.blobs, str(tmp_path)) == [expected] * size


def save_with_dcp(url: str, mesh: tuple[int, ...]) -> None:
    state = {"model": shards.dtensors(SPECS, mesh), "plain": torch.arange(5), "step": 3}
    dcp.save(state, storage_writer=StorageWriter(url, 10, chunk_nbytes=16))


def load_with_dcp(url: str, mesh: tuple[int, ...]) -> list[str]:
    wanted = shards.dtensors(SPECS, mesh)
    into: dict[str, Any] = {
        "model": shards.blank(shards.dtensors(SPECS, mesh)),
        "plain": torch.zeros(5, dtype=torch.int64),
        "step": 0,
    }
    dcp.load(into, storage_reader=StorageReader(url))
    assert into["step"] == 3
    assert torch.equal(into["plain"], torch.arange(5))
    return shards.differing(wanted, into["model"])


def load_with_us(url: str, mesh: tuple[int, ...]) -> list[str]:
    wanted, into = shards.dtensors(SPECS, mesh), shards.blank(shards.dtensors(SPECS, mesh))
    rest: dict[str, Any] = {"plain": torch.zeros(5, dtype=torch.int64), "step": 0}
    resilient.load(url, {"model": into, "state_dict": rest})
    assert rest["step"] == 3
    assert torch.equal(rest["plain"], torch.arange(5))
    return shards.differing(wanted, into)


def save_with_us(url: str, mesh: tuple[int, ...]) -> None:
    rest = {"plain": torch.arange(5), "step": 3}
    resilient.save(url, 10, {"model": shards.dtensors(SPECS, mesh), "state_dict": rest}).wait(60)


@pytest.mark.parametrize(
    ("save", "load"),
    [(save_with_dcp, load_with_dcp), (save_with_dcp, load_with_us), (save_with_us, load_with_dcp)],
    ids=["dcp.save to dcp.load", "dcp.save to resilient.load", "resilient.save to dcp.load"],
)
def test_saved_on_n_ranks_loads_on_m(tmp_path: Path, ranks: Ranks, save: Any, load: Any) -> None:
    """Also what DCP's own tests leave out: another number of ranks for DTensors."""
    for saving in (2, 4):
        url = str(tmp_path / str(saving))
        ranks(saving).run(save, url, (saving,))
        for loading in (1, 2, 3):
            assert ranks(loading).run(load, url, (loading,)) == [[]] * loading, f"{saving} -> {loading}"
        assert resilient.checkpoints(url)[0].verify().ok


def save_module(url: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    fully_shard(model, mesh=cpu_mesh((4,)))
    resilient.save(url, 1, {"model": model}).wait(60)


def load_module(url: str) -> bool:
    torch.manual_seed(0)
    wanted = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)).state_dict()
    into = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp.load({"model": into}, storage_reader=StorageReader(url))
    return all(torch.equal(wanted[name], into[name]) for name in wanted)


def test_a_sharded_module_that_we_saved_loads_as_a_plain_state_dict(tmp_path: Path, ranks: Ranks) -> None:
    ranks(4).run(save_module, str(tmp_path))
    assert ranks(2).run(load_module, str(tmp_path)) == [True, True]


def save_asynchronously(url: str) -> None:
    weights = shards.dtensors(SPECS, (2,))
    writer = StorageWriter(url)
    for _ in range(3):
        future = dcp.async_save({"model": weights, "plain": torch.arange(5), "step": 3}, storage_writer=writer)
        assert not isinstance(future, dcp.state_dict_saver.AsyncSaveResponse)
        future.result()


def test_asynchronous_saves_are_steps_one_after_the_other(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2).run(save_asynchronously, str(tmp_path))
    assert [checkpoint.step for checkpoint in resilient.checkpoints(tmp_path)] == [3, 2, 1]
    assert ranks(2).run(load_with_dcp, str(tmp_path), (2,)) == [[], []]
