"""A save through DCP keeps the rules of this library: it counts whole or not at all, and its bytes are verified."""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

import resilient
from resilient.errors import (
    ConflictError,
    CorruptError,
    ErrorKind,
    NotFoundError,
    ResilientError,
    StoreError,
    UsageError,
)
from resilient.format.digest import BytesLike
from resilient.integrations.dcp import StorageReader, StorageWriter
from resilient.store.local import LocalStore
from tests.ranks import fork_context

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((64, 8), float(value)), "b": torch.full((8,), float(value))}, "step": int(value)}


def saved(place: Any, step: int | None, value: float, **settings: Any) -> None:
    dcp.save(state(value), storage_writer=StorageWriter(place, step, **settings))


def loaded(place: Any, step: Any = "latest") -> float:
    """Return the one value that all of a checkpoint has."""
    into = state(-1)
    dcp.load(into, storage_reader=StorageReader(place, step))
    (value,) = {
        float(each) for part in (*into["model"].values(), torch.tensor([into["step"]])) for each in part.view(-1)
    }
    return value


def failure(act: Callable[[], object]) -> ResilientError:
    """Return what a rank's part of a DCP call failed with."""
    with pytest.raises(CheckpointException) as caught:
        act()
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, ResilientError), error
    return error


def steps(place: Path) -> list[int]:
    return [checkpoint.step for checkpoint in resilient.checkpoints(place)]


def test_steps_are_named_by_the_writer_by_an_id_or_follow_the_newest(tmp_path: Path) -> None:
    saved(tmp_path, None, 1)
    saved(tmp_path, 10, 2)
    writer = StorageWriter(tmp_path)
    dcp.save(state(3), storage_writer=writer)
    dcp.save(state(4), storage_writer=writer, checkpoint_id="20")
    dcp.save(state(5), storage_writer=writer)
    assert steps(tmp_path) == [21, 20, 11, 10, 1]
    assert [loaded(tmp_path, step) for step in (1, 10, 11, 20, 21, "latest")] == [1, 2, 3, 4, 5, 5]
    reader = StorageReader(tmp_path)
    into = state(0)
    dcp.load(into, storage_reader=reader, checkpoint_id="10")
    assert into["step"] == 2
    dcp.load(into, storage_reader=reader)
    assert into["step"] == 5
    # One writer needs one generation for steps that go up.
    assert [each.generation for each in resilient.checkpoints(tmp_path)] == [3, 3, 3, 2, 1]
    for bad in (-1, True, "runs/gpt", 10**12):
        with pytest.raises(UsageError, match="not a step"):
            dcp.save(state(1), storage_writer=StorageWriter(tmp_path), checkpoint_id=bad)


def test_a_step_before_the_newest_is_refused_unless_it_is_meant(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saved(tmp_path, step, step)
    error = failure(lambda: saved(tmp_path, 2, 9))
    assert isinstance(error, ConflictError)
    assert error.kind is ErrorKind.ALREADY_SAVED
    assert steps(tmp_path) == [3, 2, 1]
    saved(tmp_path, 2, 9, overwrite=True)
    assert steps(tmp_path) == [2, 1]
    assert loaded(tmp_path) == 9


class Mortal(LocalStore):
    """Kills this process before its ``life``-th operation that changes something."""

    def __init__(self, root: str, life: int) -> None:
        super().__init__(root)
        self.life = life

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        self.live()
        super().put(key, parts)

    def create(self, key: str, data: bytes) -> bool:
        self.live()
        return super().create(key, data)

    def delete(self, key: str) -> None:
        self.live()
        super().delete(key)

    def live(self) -> None:
        self.life -= 1
        if self.life == 0:
            os._exit(7)


def overwrite_and_die(root: str, life: int) -> None:
    import warnings

    warnings.simplefilter("ignore")
    saved(Mortal(root, life), 5, 6.0)


def test_a_crash_at_any_moment_of_saving_a_step_again_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    """DCP overwrites in place: a crash in the middle destroys the only checkpoint (E2 of the study)."""
    life, ended = 0, 7
    saved(tmp_path / "before", 5, 5)
    while ended == 7:
        life += 1
        assert life < 60
        root = tmp_path / str(life)
        shutil.copytree(tmp_path / "before", root)
        process = fork_context().Process(target=overwrite_and_die, args=(str(root), life))
        process.start()
        process.join(120)
        assert process.exitcode is not None
        ended = process.exitcode
        assert steps(root) == [5], f"at operation {life}"
        assert loaded(root) in ({6} if ended == 0 else {5, 6})
        saved(root, 6, 7)
        assert loaded(root) == 7
    assert ended == 0
    assert life > 6, "so few operations are no save"


class Full(LocalStore):
    """Has no room for data: from the second object on, which another thread stores."""

    stored = 0

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        self.stored += 1
        if self.stored > 1:
            raise StoreError(f"{key}: no space left", kind=ErrorKind.NO_SPACE)
        super().put(key, parts)


def test_a_disk_that_is_full_for_one_thread_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP's own writer returns success then, without those tensors (E1 of the study)."""
    from resilient.integrations.dcp import sending

    monkeypatch.setattr(sending, "_OBJECT_NBYTES", 256)
    saved(tmp_path, 1, 1)
    error = failure(lambda: saved(Full(tmp_path), 2, 2, chunk_nbytes=64))
    assert isinstance(error, StoreError)
    assert error.kind is ErrorKind.NO_SPACE
    assert steps(tmp_path) == [1]
    assert loaded(tmp_path) == 1
    data = {path.name for path in (tmp_path / "data").rglob("*") if path.is_file()}
    assert data == {path for path in data if path.startswith(f"{1:012d}-")}, "what was written of it is removed"


@pytest.mark.field_report("BR-012")
def test_a_flipped_bit_is_never_loaded(tmp_path: Path) -> None:
    """DCP loads it silently (E3 of the study)."""
    saved(tmp_path, 1, 1)
    files = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    dice = random.Random("flip")
    for file in files:
        content = file.read_bytes()
        for _ in range(10):
            at = dice.randrange(8 * len(content))
            changed = bytearray(content)
            changed[at // 8] ^= 1 << at % 8
            file.write_bytes(changed)
            error = failure(lambda: loaded(tmp_path))
            assert isinstance(error, CorruptError), f"bit {at} of {file.name}"
            assert "of item 'model'" in str(error)
        file.write_bytes(content)
    assert loaded(tmp_path) == 1


@pytest.mark.field_report("BR-087")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.complex64])
def test_another_dtype_is_an_error_or_a_conversion_that_was_asked_for(tmp_path: Path, dtype: torch.dtype) -> None:
    saved(tmp_path, 1, 3)
    into = {"model": {"w": torch.zeros(64, 8, dtype=dtype), "b": torch.zeros(8)}}
    error = failure(lambda: dcp.load(into, storage_reader=StorageReader(tmp_path)))
    assert error.kind is ErrorKind.MISMATCH
    assert f"model.w: saved float32, wanted {str(dtype).removeprefix('torch.')}" in str(error)
    assert not into["model"]["w"].any()
    assert not into["model"]["b"].any(), "nothing is changed if anything differs"
    dcp.load(into, storage_reader=StorageReader(tmp_path, cast=True))
    assert torch.equal(into["model"]["w"], torch.full((64, 8), 3).to(dtype))


def test_nothing_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="holds no run"):
        loaded(tmp_path / "nowhere")
    saved(tmp_path, 1, 1)
    with pytest.raises(CheckpointException, match="there is no checkpoint of step 2"):
        loaded(tmp_path, 2)
    assert issubclass(NotFoundError, LookupError)


@pytest.mark.field_report("BR-198")
def test_no_pickle_is_stored(tmp_path: Path) -> None:
    dcp.save({"v": [1, (2, {"a": {3}})], "t": torch.ones(3)}, storage_writer=StorageWriter(tmp_path))
    for path in tmp_path.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert b"PK\x03\x04" not in content, "an archive of torch.save"
        assert b"\x80\x02" not in content[:2], "a pickle"


class Halving(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 -- DCP's name
        if isinstance(object, torch.Tensor):
            return object.bfloat16()
        stream = io.BytesIO()
        torch.save({"wrapped": object}, stream)
        return stream


def test_what_a_planner_makes_of_an_entry_is_what_is_saved(tmp_path: Path) -> None:
    dcp.save(state(3), storage_writer=StorageWriter(tmp_path), planner=Halving())
    checkpoint = resilient.checkpoints(tmp_path)[0]
    assert checkpoint.tensor("model.w").dtype is torch.bfloat16
    rest: dict[str, Any] = {"step": {}}
    resilient.load(tmp_path, {"state_dict": rest})
    assert rest == {"step": {"wrapped": 3}}
    bad = {"step": (lambda: None)}
    error = failure(lambda: dcp.save(bad, storage_writer=StorageWriter(tmp_path), planner=DefaultSavePlanner()))
    assert error.kind is ErrorKind.UNSAVEABLE


class Foreign:
    """What only the program that saved it knows."""


def test_what_a_planner_pickles_by_name_is_refused(tmp_path: Path) -> None:
    error = failure(
        lambda: dcp.save({"x": Foreign()}, storage_writer=StorageWriter(tmp_path), planner=Halving())  # its own pickle
    )
    assert isinstance(error, UsageError)
    assert "Foreign" in str(error)
    assert not steps(tmp_path)


def test_what_dcp_cannot_tell_the_ranks_is_refused(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    writer = StorageWriter(tmp_path)
    dcp.save(state(1), storage_writer=writer, planner=planner)
    with pytest.raises(CheckpointException, match="enable_plan_caching"):
        dcp.save(state(2), storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True))
    with pytest.raises(UsageError, match="use_collectives"):
        dcp.save(state(2), storage_writer=writer, use_collectives=False)
    assert steps(tmp_path) == [1]


def test_a_writer_that_was_overtaken_goes_on_in_a_generation_of_its_own(tmp_path: Path) -> None:
    first, second = StorageWriter(tmp_path), StorageWriter(tmp_path)
    for value, writer in enumerate((first, second, first, second), 1):
        dcp.save(state(value), storage_writer=writer)
    assert steps(tmp_path) == [4, 3, 2, 1]
    assert [loaded(tmp_path, step) for step in (1, 2, 3, 4)] == [1, 2, 3, 4]


def test_one_that_is_overtaken_before_it_commits_is_told(tmp_path: Path) -> None:
    class Overtaken(StorageWriter):
        def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
            saved(tmp_path, 1, 2)
            super().finish(metadata, results)

    error = failure(lambda: dcp.save(state(1), storage_writer=Overtaken(tmp_path, 1)))
    assert isinstance(error, ConflictError)
    assert error.kind is ErrorKind.TAKEN_OVER
    assert loaded(tmp_path) == 2


@pytest.mark.field_report("BR-041")
def test_many_asynchronous_saves_go_through_one_writer(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path)
    for value in range(1, 11):
        kept = state(value)
        future = dcp.async_save(kept, storage_writer=writer, no_dist=True)
        kept["model"]["w"].zero_()  # what training does next
        future.result()  # type: ignore[union-attr]
        assert loaded(tmp_path) == value
    assert steps(tmp_path) == list(range(10, 0, -1))


def test_a_training_run_is_not_saved_over(tmp_path: Path) -> None:
    from resilient.catalog.generations import claim_generation, write_base
    from resilient.catalog.run_info import open_run
    from resilient.clock import SYSTEM_CLOCK

    store = LocalStore(tmp_path)
    open_run(store, create=True, clock=SYSTEM_CLOCK)
    write_base(store, claim_generation(store, world_size=1, launch="a" * 32, heartbeat=True), None)
    error = failure(lambda: saved(tmp_path, 1, 1))
    assert error.kind is ErrorKind.RUN_IN_USE


def test_importing_the_package_does_not_import_this() -> None:
    program = "import resilient, sys; assert not [m for m in sys.modules if 'integrations' in m or 'checkpoint.' in m]"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


PROGRAM = """
import os, sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from resilient.integrations.dcp import StorageWriter

def save(place, step):
    state, how = {"w": torch.full((3,), float(step))}, AsyncCheckpointerType.PROCESS
    dcp.async_save(state, storage_writer=StorageWriter(place, step), async_checkpointer_type=how).result()

if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meeting", rank=0, world_size=1)
    for step in (4, 5):
        save(sys.argv[1] + "/run", step)
    try:
        save("memory://mine", 1)
    except Exception as error:
        print(error)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort in the interpreter's own end
"""


def test_a_process_of_dcp_saves_through_us(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "memory://mine exists in this process only" in done.stdout
    assert steps(tmp_path / "run") == [5, 4]
    assert torch.equal(resilient.checkpoints(tmp_path / "run")[0].tensor("w"), torch.full((3,), 5.0))
