"""The ways to save that are compared, behind one face: resilient's own and those of its peers.

Each saves the same tensors to a local disk and is over when they are durable; where a library leaves that to the page
cache, the files are flushed here, within the time that is taken. On several ranks the tensors are DTensors.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from states import State, check_equal
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import resilient

DEADLINE_S = 600.0


class Contestant(ABC):
    """Saves a state again and again: ``save``, then ``fence`` before anything changes, then ``wait``."""

    def __init__(self, state: State, folder: Path) -> None:
        self.state = state
        self.folder = folder
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1

    @abstractmethod
    def save(self, step: int) -> None:
        """Start to save; return as soon as the library does."""

    @abstractmethod
    def fence(self) -> None:
        """Return when the state may change."""

    @abstractmethod
    def wait(self) -> None:
        """Return when what was saved is durable."""

    @abstractmethod
    def done(self) -> bool:
        """Say whether the library has finished."""

    @abstractmethod
    def read(self, step: int, names: list[str]) -> State:
        """Return some of the tensors of a step as they were stored."""

    @abstractmethod
    def close(self) -> None:
        """End what the library has started."""

    def check(self, step: int, names: list[str]) -> None:
        """Compare what was stored as ``step`` with the live state.

        Raises:
            ValueError: a tensor differs.
        """
        found = self.read(step, names)
        for name in names:
            check_equal(name, local(found[name]), local(self.state[name]))

    def forget(self, step: int) -> None:
        """Remove a step: two are enough for any disk."""
        if self.rank == 0:
            shutil.rmtree(self.place(step), ignore_errors=True)

    def place(self, step: int) -> Path:
        return self.folder / f"step-{step}"


class Blocking(Contestant):
    """Training waits until all is durable; nothing is left to do then."""

    def fence(self) -> None: ...

    def wait(self) -> None: ...

    def done(self) -> bool:
        return True

    def close(self) -> None: ...


class Resilient(Blocking):
    """`resilient.save`, by hand: durable when committed, every byte digested."""

    def save(self, step: int) -> None:
        self._handle = resilient.save(self.folder / "run", step, {"state": self.state})

    def fence(self) -> None:
        self._handle.staged.result(DEADLINE_S)

    def wait(self) -> None:
        self._handle.wait(DEADLINE_S)

    def done(self) -> bool:
        return self._handle.committed.done()

    def read(self, step: int, names: list[str]) -> State:
        newest = resilient.checkpoints(self.folder / "run")[0]
        if newest.step != step:
            raise ValueError(f"step {step} is not there, but step {newest.step} is")
        into = {name: torch.zeros_like(self.state[name]) for name in names}
        resilient.load(self.folder / "run", {"state": into}, step, strict=False)
        return into

    def forget(self, step: int) -> None:
        """Leave old steps: the place is one run, removed with the folder."""


class TorchSave(Blocking):
    """`torch.save` to a file of each rank's own."""

    def save(self, step: int) -> None:
        self.place(step).mkdir(exist_ok=True)
        with self._file(step).open("wb") as file:
            torch.save({name: local(tensor) for name, tensor in self.state.items()}, file)
            file.flush()
            os.fsync(file.fileno())

    def read(self, step: int, names: list[str]) -> State:
        found = torch.load(self._file(step), mmap=True, weights_only=True)
        return {name: found[name] for name in names}

    def _file(self, step: int) -> Path:
        return self.place(step) / f"{self.rank}.pt"


class Safetensors(Blocking):
    """`safetensors.torch.save_file` to a file of each rank's own."""

    def save(self, step: int) -> None:
        from safetensors.torch import save_file

        self.place(step).mkdir(exist_ok=True)
        save_file({name: local(tensor) for name, tensor in self.state.items()}, self._file(step))
        flush(self._file(step))

    def read(self, step: int, names: list[str]) -> State:
        from safetensors import safe_open

        with safe_open(self._file(step), framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}

    def _file(self, step: int) -> Path:
        return self.place(step) / f"{self.rank}.safetensors"


class Dcp(Blocking):
    """`torch.distributed.checkpoint.save`: training waits until all is durable."""

    def save(self, step: int) -> None:
        dcp.save(self.state, storage_writer=self.writer(step), no_dist=self.ranks == 1)

    def read(self, step: int, names: list[str]) -> State:
        into = {name: torch.zeros_like(self.state[name]) for name in names}
        dcp.load(into, checkpoint_id=self.place(step), no_dist=self.ranks == 1)
        return into

    def writer(self, step: int) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(self.place(step), sync_files=True)


class DcpAsync(Dcp):
    """`async_save` with a thread and a stager that is kept: the fastest that it has been made to be on a CPU."""

    kind = AsyncCheckpointerType.THREAD

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
            )
        )
        self._future: Future[Any] = Future()

    def save(self, step: int) -> None:
        future = dcp.async_save(
            self.state,
            storage_writer=self.writer(step),
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
            no_dist=self.ranks == 1 and not dist.is_initialized(),
        )
        assert isinstance(future, Future)  # a stager that copies at once gives no response of two parts
        self._future = future

    def wait(self) -> None:
        self._future.result(DEADLINE_S)

    def done(self) -> bool:
        return self._future.done()

    def close(self) -> None:
        self._stager.close()


class DcpProcess(DcpAsync):
    """`async_save` with a process of its own, which has to have a process group."""

    kind = AsyncCheckpointerType.PROCESS


def meet_alone(name: str) -> None:
    """Make the process group of one rank that `DcpProcess` has to have."""
    if CONTESTANTS[name] is DcpProcess:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{os.environ['BENCH_PORT']}", rank=0, world_size=1)


class TorchCheckpointing(Blocking):
    """`torch_checkpointing`, asynchronous; it leaves the flush to others.

    As it comes it writes with O_DIRECT from where its pieces happen to lie, which ext4 refuses (EINVAL): turned off.
    """

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        from torch_checkpointing import AsyncCheckpointSaverConfig, CheckpointManager
        from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        patient = AsyncCheckpointSaverConfig(process_config=CheckpointProcessConfig(subprocess_init_timeout_secs=120))
        self._manager = CheckpointManager(CheckpointManager.Config(save=patient, storage_config=storage))
        self._future: Future[Any] = Future()
        self._step = 0

    def save(self, step: int) -> None:
        self._step = step
        future = self._manager.save(str(self.place(step)), {"state": self.state})
        if future is None:
            raise ValueError("the save was not asynchronous")
        self._future = future

    def fence(self) -> None:
        with self._manager.lock():
            pass

    def wait(self) -> None:
        self._future.result(DEADLINE_S)
        flush(self.place(self._step))

    def done(self) -> bool:
        return self._future.done()

    def read(self, step: int, names: list[str]) -> State:
        into = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        found = self._manager.load(str(self.place(step)), into={"state": into})["state"]
        return {name: found[name] for name in names}

    def close(self) -> None:
        self._manager.close()


class Torchsnapshot(Blocking):
    """`torchsnapshot.Snapshot.async_take`; it leaves the flush to others, and knows no DTensors."""

    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        import torchsnapshot

        self._library = torchsnapshot
        self._pending: Any = None
        self._step = 0

    def save(self, step: int) -> None:
        self._step = step
        held = self._library.StateDict(**{name: local(tensor) for name, tensor in self.state.items()})
        self._pending = self._library.Snapshot.async_take(str(self.place(step)), {"state": held})

    def wait(self) -> None:
        self._pending.wait()
        flush(self.place(self._step))

    def done(self) -> bool:
        return bool(self._pending.done())

    def read(self, step: int, names: list[str]) -> State:
        snapshot = self._library.Snapshot(str(self.place(step)))
        return {name: snapshot.read_object(f"{self.rank}/state/{name}") for name in names}


CONTESTANTS: dict[str, Callable[[State, Path], Contestant]] = {
    "resilient": Resilient,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    "DCP": Dcp,
    "DCP async, thread": DcpAsync,
    "DCP async, process": DcpProcess,
    "torch_checkpointing": TorchCheckpointing,
    "torchsnapshot": Torchsnapshot,
}


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return getattr(tensor, "_local_tensor", tensor)


def flush(place: Path) -> None:
    """Make a file, or all files of a folder and the folder itself, durable."""
    for path in [place, *place.rglob("*")] if place.is_dir() else [place]:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
