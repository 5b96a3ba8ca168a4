"""The systems of fault_matrix.py, behind one face: save a state on some ranks, name the newest step, restore it.

Each is used as its documentation says, with the same deadlines where it has any. What two of them do is written down
here from their documented behavior, on `torch.save`: the trainers that do it bring much more that is not looked at.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fault_states import Items, copy_into, local
from torch.distributed.checkpoint import _fsspec_filesystem as fsspec_filesystem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import resilient


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A place, and how its system is to save: ``sync``, or asynchronously in a ``thread`` or a ``process``.

    ``patience_s`` is what every system that can be told a deadline is told.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)
    mode: str = "sync"
    patience_s: float = 20.0

    @property
    def remote(self) -> bool:
        return "://" in self.url

    def file_system(self) -> Any:
        protocol = self.url.partition("://")[0] if self.remote else "file"
        return fsspec.filesystem(protocol, skip_instance_cache=True, use_listings_cache=False, **self.options)


class System(ABC):
    """Saves and restores ``items``; every rank has one."""

    needs: str | None = None  # the package that it is, if it may be missing
    remote = False  # whether it has a way to save to an object store
    gathers = False  # whether rank 0 writes everything
    reshards = True  # whether another number of ranks can restore, on this machine
    modes: tuple[str, ...] = ("sync",)
    fence = ""  # what its user should hold while the state changes

    def __init__(self, where: Where) -> None:
        self.where = where
        self.rank = dist.get_rank()

    @abstractmethod
    def save(self, items: Items, step: int) -> None:
        """Start to save; return as soon as the system does."""

    def wait(self) -> None:  # noqa: B027 -- nothing is left to do for those that save at once
        """Return when the last save is what the system calls done; raise if it failed."""

    @abstractmethod
    def latest(self) -> int | None:
        """Return what the system, or its documented way to resume, takes for the newest step."""

    @abstractmethod
    def restore(self, items: Items, step: int | None) -> int | None:
        """Fill items from a step, or from what is taken for the newest; return it, or None if nothing was found."""

    def forget(self, step: int) -> None:
        """Remove an old step, if the system leaves that to its user."""
        if self.rank == 0 and not self.where.remote:
            shutil.rmtree(self.place(step), ignore_errors=True)

    def place(self, step: int) -> str:
        return f"{self.where.url}/step-{step}"

    def steps(self, pattern: str) -> list[int]:
        """Return the numbers in the names of what lies in the place."""
        files = self.where.file_system()
        if not files.exists(self.where.url):
            return []
        names = [Path(each).name for each in files.ls(self.where.url, detail=False)]
        return [int(found[1]) for name in names if (found := re.fullmatch(pattern, name))]


class Resilient(System):
    """`resilient.save`, always asynchronous; restarts as `resilient.train` does."""

    remote = True
    modes = ("sync", "thread", "process")

    def save(self, items: Items, step: int) -> None:
        self._handle = resilient.save(self.where.url, step, items, storage_options=self.where.options)

    def wait(self) -> None:
        self._handle.wait()

    def latest(self) -> int | None:
        found = resilient.checkpoints(self.where.url, storage_options=self.where.options)
        return found[0].step if found else None

    def restore(self, items: Items, step: int | None) -> int | None:
        if step is not None:
            return resilient.load(self.where.url, items, step, storage_options=self.where.options).step
        steps: list[int] = []

        # Not strict: what was saved by hand has nothing of the run itself, such as its step and its random numbers.
        @resilient.train(self.where.url, every=10**9, strict=False, storage_options=dict(self.where.options))
        def main(run: resilient.Run) -> None:
            restored = run.track(**items)
            steps.extend([restored.step] if restored else [])

        main()
        return steps[0] if steps else None

    def forget(self, step: int) -> None:
        """Leave old steps: the run removes them."""


class Dcp(System):
    """`torch.distributed.checkpoint`, one folder a step; the newest is the highest number that has its `.metadata`."""

    remote = True
    modes = ("sync", "thread", "process")

    def __init__(self, where: Where) -> None:
        super().__init__(where)
        # Its background thread must not share a group with training.
        self._group = None if where.mode == "sync" else dist.new_group(backend="gloo")
        self._future: Any = None

    def save(self, items: Items, step: int) -> None:
        if self.where.mode == "sync":
            dcp.save(items, storage_writer=self._writer(step))
            return
        kinds = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}
        self._future = dcp.async_save(
            items,
            storage_writer=self._writer(step),
            process_group=self._group,
            async_checkpointer_type=kinds[self.where.mode],
        )

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()

    def latest(self) -> int | None:
        files = self.where.file_system()
        whole = (each for each in self.steps(r"step-(\d+)") if files.exists(f"{self.place(each)}/.metadata"))
        return max(whole, default=None)

    def restore(self, items: Items, step: int | None) -> int | None:
        step = self.latest() if step is None else step
        if step is not None:
            reader: Any = (
                fsspec_filesystem.FsspecReader(self.place(step), **self.where.options)
                if self.where.remote
                else dcp.FileSystemReader(self.place(step))
            )
            dcp.load(items, storage_reader=reader)
        return step

    def _writer(self, step: int) -> Any:
        if self.where.remote:
            return fsspec_filesystem.FsspecWriter(self.place(step), **self.where.options)
        return dcp.FileSystemWriter(self.place(step), thread_count=2)


class TorchCheckpointing(System):
    """`torch_checkpointing`, asynchronous; the newest is the highest number that is there.

    Its resharder gathers what it needs through CUDA, whatever the process group is: it is left out where there is none.
    """

    needs = "torch_checkpointing"
    reshards = torch.cuda.is_available()
    fence = "manager.lock()"
    modes = ("sync", "thread", "process")

    def __init__(self, where: Where) -> None:
        super().__init__(where)
        self._manager: Any = None
        self._future: Future[Any] | None = None

    def save(self, items: Items, step: int) -> None:
        if self._manager is None:
            from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
            from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
            from torch_checkpointing.config import AsyncCheckpointSaverConfig

            patient = CheckpointProcessConfig(subprocess_init_timeout_secs=120)
            writer = CheckpointWriterConfig(checkpoint_write_barrier_timeout_sec=int(self.where.patience_s))
            self._manager = self._make(AsyncCheckpointSaverConfig(process_config=patient, writer_config=writer))
        self._future = self._manager.save(self.place(step), items)

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()

    def latest(self) -> int | None:
        return max(self.steps(r"step-(\d+)"), default=None)

    def restore(self, items: Items, step: int | None) -> int | None:
        from torch_checkpointing.config import SyncCheckpointSaverConfig

        step = self.latest() if step is None else step
        if step is not None:
            found = self._make(SyncCheckpointSaverConfig()).load(self.place(step), into=items)
            for item, tensors in items.items():
                for name, tensor in tensors.items():
                    local(tensor).copy_(local(found[item][name]))
        return step

    @classmethod
    def _make(cls, save: Any) -> Any:
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.default_resharder import DefaultResharder
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        return CheckpointManager(
            CheckpointManager.Config(
                save=save,
                default=ItemSpec(resharder=DefaultResharder() if cls.reshards else None),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),  # ext4 refuses it
            )
        )


class Gathering(System):
    """Rank 0 writes everything, with `torch.save`; the others wait at a barrier."""

    gathers = True

    def save(self, items: Items, step: int) -> None:
        whole = {item: {name: each.full_tensor() for name, each in tensors.items()} for item, tensors in items.items()}
        if self.rank == 0:
            self.write(whole, step)
        dist.barrier()

    def restore(self, items: Items, step: int | None) -> int | None:
        step = self.latest() if step is None else step
        if step is not None:
            step, found = self.read(step)
            copy_into(items, found)
        return step

    @abstractmethod
    def write(self, whole: Items, step: int) -> None: ...

    @abstractmethod
    def read(self, step: int) -> tuple[int, Items]: ...


class TorchSaveRename(Gathering):
    """One file a step: written under another name, flushed, renamed."""

    remote = True

    def write(self, whole: Items, step: int) -> None:
        files, path = self.where.file_system(), self._path(step)
        if self.where.remote:
            with files.open(f"{path}.tmp", "wb") as file:
                torch.save({**whole, "step": step}, file)
            files.mv(f"{path}.tmp", path)
            return
        temporary = Path(f"{path}.tmp")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save({**whole, "step": step}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def latest(self) -> int | None:
        return max(self.steps(r"step-(\d+)\.pt"), default=None)

    def read(self, step: int) -> tuple[int, Items]:
        with self.where.file_system().open(self._path(step), "rb") as file:
            found = torch.load(file, weights_only=True)
        return found.pop("step"), found

    def forget(self, step: int) -> None:
        if self.rank == 0 and not self.where.remote:
            Path(self._path(step)).unlink(missing_ok=True)

    def _path(self, step: int) -> str:
        return f"{self.where.url}/step-{step}.pt"


class LightningStyle(Gathering):
    """The best two by a metric, and `last.ckpt`, each written in a transaction; resumes from `last.ckpt`.

    Without a `last.ckpt` it warns and starts from scratch. The metric is best for the newest here.
    """

    remote = True
    _TOP = 2
    _LAST = 0

    def write(self, whole: Items, step: int) -> None:
        content = BytesIO()
        torch.save({**whole, "step": step}, content)
        files = self.where.file_system()
        files.makedirs(self.where.url, exist_ok=True)
        for path in (self._path(step), self._path(self._LAST)):
            # Their file is a temporary one until the end of the transaction, in a folder of the same file system here.
            with files.transaction, files.open(path, "wb") as file:
                file.write(content.getvalue())
        for old in sorted(self.steps(r"step=(\d+)\.ckpt"))[: -self._TOP]:
            files.rm(self._path(old))

    def latest(self) -> int | None:
        return self._LAST if self.where.file_system().exists(self._path(self._LAST)) else None

    def read(self, step: int) -> tuple[int, Items]:
        with self.where.file_system().open(self._path(step), "rb") as file:
            found = torch.load(file)
        return found.pop("step"), found

    def forget(self, step: int) -> None:
        """Leave old steps: the rotation removes them."""

    def _path(self, step: int) -> str:
        return f"{self.where.url}/last.ckpt" if step == self._LAST else f"{self.where.url}/step={step}.ckpt"


class HuggingFaceStyle(Gathering):
    """`checkpoint-N` with model, optimizer and trainer state, written one after another; at most two stay.

    Resumes from the highest number. Without the model's file that is an error; without the optimizer's, or the
    trainer's, it goes on with a fresh one.
    """

    _LIMIT = 2

    def write(self, whole: Items, step: int) -> None:
        from safetensors.torch import save_file

        place = Path(self.place(step))
        place.mkdir(parents=True, exist_ok=True)
        save_file(whole["model"], place / "model.safetensors", metadata={"format": "pt"})
        torch.save(whole["optim"], place / "optimizer.pt")
        (place / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        for old in sorted(self.steps(r"checkpoint-(\d+)"))[: -self._LIMIT]:
            shutil.rmtree(self.place(old))

    def latest(self) -> int | None:
        return max(self.steps(r"checkpoint-(\d+)"), default=None)

    def read(self, step: int) -> tuple[int, Items]:
        from safetensors.torch import load_file

        place = Path(self.place(step))
        model, optimizer, state = (place / each for each in ("model.safetensors", "optimizer.pt", "trainer_state.json"))
        if not model.is_file():
            raise ValueError(f"Can't find a valid checkpoint at {place}")
        found = {"model": load_file(model)}
        if optimizer.is_file():
            found["optim"] = torch.load(optimizer, weights_only=True)
        return json.loads(state.read_text())["global_step"] if state.is_file() else 0, found

    def forget(self, step: int) -> None:
        """Leave old steps: the rotation removes them."""

    def place(self, step: int) -> str:
        return f"{self.where.url}/checkpoint-{step}"


SYSTEMS: dict[str, type[System]] = {
    "resilient": Resilient,
    "DCP": Dcp,
    "torch_checkpointing": TorchCheckpointing,
    "torch.save + rename": TorchSaveRename,
    "Lightning-style": LightningStyle,
    "HF-style": HuggingFaceStyle,
}


def use_temporary_folder(folder: str) -> None:
    """Have temporary files on the file system of the place: else a rename becomes a copy."""
    tempfile.tempdir = folder
