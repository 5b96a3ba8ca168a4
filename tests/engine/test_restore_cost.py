"""A restore reads what it needs, and needs little memory beside what it fills."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros

import resilient
from resilient.catalog.line import read_line
from resilient.engine.checkpoint import Checkpoint
from resilient.store.base import Store
from resilient.store.open import open_store
from tests.engine.counting import CountingStore
from tests.figures import Figures
from tests.lives import Life

MIB = 1 << 20
TENSORS = 16


@pytest.mark.proof
@pytest.mark.s3
@pytest.mark.timeout(900)
@pytest.mark.field_report("BR-218")
def test_one_tensor_out_of_a_large_checkpoint_reads_little_more_than_that_tensor(
    s3_url: str, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    rounds = figures("one-tensor", "One 1 MiB tensor read out of a checkpoint on S3")
    if len(rounds):
        return  # proven before
    total = count(64, 1024)
    state = {f"layers.{number}.weight": torch.full((MIB // 4,), float(number)) for number in range(total)}
    resilient.save(s3_url, 1, {"model": state}).wait(600)
    del state
    counting = CountingStore(open_store(s3_url))
    store = cast("Store", counting)
    tensor = Checkpoint(store, read_line(open_store(s3_url)).at(1)).tensor("layers.17.weight")
    assert torch.equal(tensor, torch.full((MIB // 4,), 17.0))
    rounds.add(checkpoint_mib=total, data_bytes=counting.data, document_bytes=counting.documents)
    assert counting.data <= 1.1 * MIB
    assert counting.documents <= 256 << 10


def peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def sharded(nbytes: int) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = nbytes // TENSORS // 4 // 1024
    return {f"t{number}": zeros(rows, 1024, device_mesh=mesh, placements=[Shard(0)]) for number in range(TENSORS)}


def save_sharded(place: str, nbytes: int) -> None:
    dist.init_process_group("gloo")
    state = sharded(nbytes)
    for tensor in state.values():
        tensor.to_local().uniform_()
    resilient.save(place, 1, {"state": state}).wait(300)
    dist.barrier()


def restore_sharded(place: str, nbytes: int, folder: str) -> None:
    """Fill this rank's quarter and report the peak of the whole process."""
    dist.init_process_group("gloo")
    before = peak_nbytes()
    state = sharded(nbytes)
    resilient.load(place, {"state": state})
    assert all(tensor.to_local().any() for tensor in state.values())
    report = {"before": before, "peak": peak_nbytes()}
    Path(folder, f"peak-{os.environ['RANK']}").write_text(json.dumps(report))
    dist.barrier()


@pytest.mark.field_report("BR-163")
@pytest.mark.proof
@pytest.mark.timeout(900)
def test_a_rank_that_restores_a_quarter_needs_little_more_memory_than_that_quarter(
    tmp_path: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    rounds = figures("restore-memory", "Peak memory of a rank that restores a quarter of a sharded state")
    if len(rounds):
        return  # proven before
    nbytes = count(256, 4096) * MIB
    share = nbytes // 4
    place = str(tmp_path / "run")
    Life(4, tmp_path / "saving", save_sharded, place, nbytes).succeed(600)
    Life(4, tmp_path / "loading", restore_sharded, place, nbytes, str(tmp_path)).succeed(600)
    for path in sorted(tmp_path.glob("peak-*")):
        report = json.loads(path.read_text())
        rounds.add(
            share_mib=share // MIB, process_before_mib=report["before"] // MIB, process_peak_mib=report["peak"] // MIB
        )
        assert report["peak"] - report["before"] <= 1.3 * share + 300 * MIB
        if nbytes == 4096 * MIB:
            assert report["peak"] <= 1.3 * share + 300 * MIB, "the whole process, torch itself included"
