"""What ``dcp.load`` reads through: any checkpoint of this library, and those that DCP itself has written."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, ReadItem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

import resilient.state.torch_values  # noqa: F401 -- dtypes and sizes are values
from resilient.catalog.choosing import newest_unmarked
from resilient.catalog.contents import Contents, open_manifest
from resilient.catalog.dcp.names import entries, fqn_of, path_of
from resilient.catalog.dcp.view import is_foreign, run_at
from resilient.catalog.line import read_line
from resilient.catalog.marks import reading
from resilient.engine.read import fill
from resilient.errors import ConflictError, ErrorKind, NotFoundError, UsageError
from resilient.events import Bus, FellBack
from resilient.format import values
from resilient.format.box import Box
from resilient.format.documents import Commit, Tensor, decode_document, encode_document
from resilient.integrations.dcp.place import Place
from resilient.integrations.dcp.steps import is_step, step_of
from resilient.observe.logs import show_logs
from resilient.state.prepare import Target
from resilient.state.tensors import dtype_name, dtype_of
from resilient.store.base import Store


@dataclass(slots=True)
class _Opened:
    """A checkpoint as DCP sees it: entries by their dotted names."""

    store: Store
    commit: Commit
    contents: Contents
    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)


class StorageReader(dcp.StorageReader):
    """Reads a step of a run, or a checkpoint that DCP has written, for ``dcp.load``.

    Each rank reads what it needs and compares every byte before it is used. A dtype that differs is an error unless
    ``cast`` is set. Nothing that is stored is unpickled.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Store,
        step: int | Literal["latest"] = "latest",
        *,
        cast: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Say where to load from; nothing is reached yet.

        Args:
            store: a URL, a path or a `Store`.
            step: a committed step, or "latest"; a ``checkpoint_id`` that is given to ``dcp.load`` takes its place.
            cast: convert a tensor that was saved with another dtype than that of its destination.
            storage_options: for what reaches a URL; see `resilient.store.open.open_store`.
        """
        super().__init__()
        self._place = Place(store, storage_options)
        self._asked: int | Literal["latest"] = "latest" if step == "latest" else step_of(step)
        self._next = self._asked
        self._cast = cast
        self._opened: _Opened | None = None
        self._passed: list[FellBack] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        # For the next load alone: DCP does not call this for one without an id.
        self._next = self._asked if checkpoint_id is None else step_of(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_step(checkpoint_id)

    def read_metadata(self, *args: Any, **ranks: Any) -> Metadata:
        """Return what the checkpoint holds, each tensor as one chunk: how it is cut up is for `read_data` to know."""
        del args, ranks
        store = run_at(self._place.store)
        step, self._next = self._next, self._asked
        self._opened, self._passed = None, []
        self._opened = _open(store, _chosen(store, step, self._passed))
        return _metadata(self._opened)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 -- DCP's
        del metadata, is_coordinator, args, kwargs

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Let all ranks read the coordinator's step: a save may be committed while they look for the newest."""
        chosen = encode_document(self._current.commit)
        bus = Bus()
        show_logs(bus, only=(FellBack,))
        for event in self._passed:
            bus.emit(event)
        return [replace(plan, storage_data=chosen) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill this rank's tensors, and hand its values over.

        Raises:
            UsageError: a dtype differs; all that do are listed, and nothing was changed on this rank.
            CorruptError: stored bytes are wrong; the destination is then spoiled.
        """
        opened = self._agreed(plan)
        # A mark keeps retention away from the step while it is read.
        with nullcontext() if is_foreign(opened.commit) else reading(opened.store, opened.commit):
            filled = self._fill(opened, plan, planner)
        for request, tensor in filled:
            planner.commit_tensor(request, tensor)
        for request in plan.items:
            if request.type is LoadItemType.BYTE_IO:
                planner.load_bytes(request, _as_torch_saves(_wanted(opened.values, request)))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @property
    def _current(self) -> _Opened:
        if self._opened is None:
            raise ConflictError("read_metadata comes first", kind=ErrorKind.INCOMPLETE)
        return self._opened

    def _agreed(self, plan: LoadPlan) -> _Opened:
        """Return the checkpoint that the coordinator has chosen, which need not be the one this rank looked at."""
        mine = self._current
        chosen: Commit = decode_document(Commit, plan.storage_data, "the coordinator's choice")
        if chosen == mine.commit:
            return mine
        return _open(mine.store, chosen)

    def _fill(self, opened: _Opened, plan: LoadPlan, planner: LoadPlanner) -> list[tuple[ReadItem, torch.Tensor]]:
        targets: list[Target] = []
        filled: list[tuple[ReadItem, torch.Tensor]] = []
        casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        different: list[str] = []
        for request in plan.items:
            if request.type is LoadItemType.BYTE_IO:
                continue
            fqn = request.storage_index.fqn
            saved = _wanted(opened.tensors, request)
            into = planner.resolve_tensor(request).detach()
            box = Box(tuple(request.storage_offsets), tuple(request.lengths))
            if tuple(into.shape) != box.size or not box.within(saved.shape):
                different.append(f"{fqn}: {list(box.size)} of {list(saved.shape)} into {list(into.shape)}")
                continue
            filled.append((request, into))
            read = into
            if into.dtype != dtype_of(saved.dtype):
                if not self._cast:
                    different.append(f"{fqn}: saved {saved.dtype}, wanted {dtype_name(into.dtype)}")
                    continue
                read = torch.empty(box.size, dtype=dtype_of(saved.dtype))
                casts.append((into, read))
            if box.volume:
                targets.append(Target(tensor=saved, box=box, into=read))
        if different:
            raise UsageError(
                f"step {opened.commit.step} differs from what it is loaded into: {'; '.join(different)}",
                kind=ErrorKind.MISMATCH,
                hint="StorageReader(..., cast=True) converts dtypes",
            )
        fill(opened.store, opened.contents, targets)
        for wanted, read in casts:
            wanted.copy_(read)
        return filled


def _chosen(store: Store, step: int | Literal["latest"], passed: list[FellBack]) -> Commit:
    """Return the step that is asked for; ``passed`` gets those that are marked failed and so are passed over."""
    line = read_line(store)
    if step != "latest":
        return line.at(step)
    if not line.commits:
        raise NotFoundError(f"{store.url} holds no committed checkpoint", kind=ErrorKind.NO_CHECKPOINT)
    return newest_unmarked(store, line, lambda commit, why: passed.append(FellBack(step=commit.step, why=why)))


def _open(store: Store, commit: Commit) -> _Opened:
    contents = open_manifest(store, commit)
    opened = _Opened(store, commit, contents)
    tensors = {(tensor.item, tensor.name, tensor.rank): tensor for tensor in contents.tensors}
    for tensor in contents.tensors:
        fqn = fqn_of(tensor.item, tensor.name, tensor.rank)
        opened.tensors[fqn] = tensor if tensor.alias is None else tensors[tensor.item, tensor.alias, tensor.rank]
        opened.paths[fqn] = path_of(tensor.item, tensor.path, tensor.rank)
    for each in contents.values:
        top = path_of(each.item, each.path, each.rank)
        try:
            value = values.decode(each.data)
        except UsageError as error:
            value = error  # raised to whoever wants this entry
        for path, entry in entries(value, top):
            fqn = ".".join(map(str, path))
            opened.values[fqn] = entry
            opened.paths[fqn] = path
    return opened


def _metadata(opened: _Opened) -> Metadata:
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for fqn, tensor in opened.tensors.items():
        size = torch.Size(tensor.shape)
        whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
        properties = TensorProperties(dtype=dtype_of(tensor.dtype))
        described[fqn] = TensorStorageMetadata(properties=properties, size=size, chunks=[whole])
    described.update((fqn, BytesStorageMetadata()) for fqn in opened.values)
    return Metadata(state_dict_metadata=described, planner_data=opened.paths, storage_data={})


def _wanted(found: Mapping[str, Any], request: ReadItem) -> Any:
    fqn = request.storage_index.fqn
    if fqn not in found:
        raise NotFoundError(
            f"the step that the coordinator has chosen has no {fqn!r}",
            kind=ErrorKind.NO_SUCH_ITEM,
            hint="steps of several shapes are in one place: say which one to load",
        )
    if isinstance(found[fqn], UsageError):
        raise found[fqn]
    return found[fqn]


def _as_torch_saves(value: object) -> io.BytesIO:
    """Return a value as a planner expects it: it decodes what DCP would have stored."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream
