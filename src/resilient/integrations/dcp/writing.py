"""What ``dcp.save`` writes through: data, receipts and a commit of this library's own format."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import resilient.state.torch_values  # noqa: F401 -- dtypes and sizes are values
from resilient.catalog.commit import write_receipt
from resilient.catalog.dcp.archive import read_value
from resilient.catalog.dcp.names import Name, name_of
from resilient.catalog.dcp.unpickling import Refused
from resilient.catalog.prune import give_up
from resilient.clock import SYSTEM_CLOCK
from resilient.config import parse_bandwidth
from resilient.errors import ConflictError, CorruptError, ErrorKind, StoreError, UsageError
from resilient.format import values
from resilient.format.box import Box
from resilient.format.chunks import Chunks
from resilient.format.documents import Item, Receipt, Tensor, Value
from resilient.integrations.dcp.attempts import Attempts, Ticket
from resilient.integrations.dcp.place import Place
from resilient.integrations.dcp.sending import Sender
from resilient.integrations.dcp.steps import is_step, step_of
from resilient.state.gathering import unsaveable
from resilient.state.tensors import dtype_name, why_unsaveable
from resilient.store.base import Store
from resilient.store.throttled import Bandwidth

_Parts = list[tuple[int, Box, torch.Tensor]]


class StorageWriter(dcp.StorageWriter):
    """Writes what ``dcp.save`` and ``dcp.async_save`` are given as a step of a run.

    The save counts when `finish` has committed it, on the coordinator, and not before: whatever fails or dies until
    then, the checkpoints that were there stay as they are. Every byte has a digest. Values are stored in this library's
    encoding, never pickled. No collective is made beside DCP's own.

    May be used for one save after another. Several processes that save into one place follow each other as the rules
    for generations say; the one that was overtaken gets an error.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Store,
        step: int | None = None,
        *,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        chunk_nbytes: int = 4 << 20,
        max_bandwidth: str | None = None,
    ) -> None:
        """Say where to save and as which step; nothing is reached yet.

        Args:
            store: a URL, a path or a `Store`; the same on all ranks.
            step: completed steps of training; a ``checkpoint_id`` that is given to ``dcp.save`` takes its place. None:
                the one after the newest.
            overwrite: take a step before the newest, too; the later ones then count no longer. A step that is the
                newest may always be saved again: the one that is there counts until the new one is complete.
            storage_options: for what reaches a URL; see `resilient.store.open.open_store`.
            chunk_nbytes: the largest piece with a digest of its own.
            max_bandwidth: of this rank's uploads, as in "200MB/s".
        """
        super().__init__()
        self._place = Place(store, storage_options)
        self._asked = None if step is None else step_of(step)
        self._step, self._next = self._asked, self._asked
        self._overwrite = overwrite
        self._chunk_nbytes = chunk_nbytes
        self._max_bandwidth = None if max_bandwidth is None else parse_bandwidth(max_bandwidth)
        self._attempts: Attempts | None = None
        self._ticket: Ticket | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        # For the next save alone: DCP does not call this for one without an id.
        self._next = self._asked if checkpoint_id is None else step_of(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_step(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 -- DCP's
        del is_coordinator, args
        self._step, self._next = self._next, self._asked
        self._ticket = None
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "a save with use_collectives=False is many checkpoints of one rank each, and none of all",
                kind=ErrorKind.INVALID_ARGUMENT,
                hint="leave it out, or use resilient.save, which makes no collectives",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        _refuse_cached(plan)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decide on the attempt, on the coordinator, and let each rank know with its plan."""
        for plan in plans:
            _refuse_cached(plan)
        if self._attempts is None:
            self._attempts = Attempts(self._place.store, overwrite=self._overwrite)
        attempt = self._attempts.begin(self._step, len(plans))
        tickets = [Ticket(attempt=attempt, rank=rank, world_size=len(plans)) for rank in range(len(plans))]
        self._ticket = tickets[0]
        return [replace(plan, storage_data=ticket) for plan, ticket in zip(plans, tickets, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Store this rank's part, then its receipt; if that fails, the attempt is given up."""
        ticket = plan.storage_data
        assert isinstance(ticket, Ticket), "the coordinator's prepare_global_plan has put it there"
        store = self._place.store
        data = store if self._max_bandwidth is None else store.throttled(Bandwidth(self._max_bandwidth))
        sender = Sender(data, ticket.attempt, ticket.rank, chunk_nbytes=self._chunk_nbytes)
        try:
            tensors, parts, found = _resolved(plan, planner)
            sender.send(parts)
            write_receipt(store, _receipt(ticket, tensors, found, sender))
        except Exception as error:
            # A store that is away can remove nothing, and trying would take long again.
            if not (isinstance(error, StoreError) and error.retryable):
                with suppress(StoreError):  # the error that led here is the one to tell; a later life collects it
                    sender.withdraw()
                    give_up(store, ticket.attempt, SYSTEM_CLOCK, reason="a rank could not write its data")
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(item.index, _nbytes(item), ticket) for item in plan.items])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the step, on the coordinator; from now on it counts."""
        del metadata
        # By what was written: another save of this writer may have begun meanwhile.
        ticket = next((result.storage_data for found in results for result in found), self._ticket)
        if self._attempts is None or ticket is None:
            raise ConflictError("no save was begun that could be finished", kind=ErrorKind.SAVE_FAILED)
        self._attempts.commit(ticket.attempt, ticket.world_size)

    def __getstate__(self) -> dict[str, Any]:
        # In another process, this is another job's writer: it claims a generation of its own.
        return {**self.__dict__, "_attempts": None, "_ticket": None}


def _refuse_cached(plan: SavePlan) -> None:
    if not plan.usable:
        raise UsageError(
            "with enable_plan_caching, DCP does not tell the ranks which save they take part in",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint="use a planner without it: resilient.save caches plans by itself",
        )


def _resolved(plan: SavePlan, planner: SavePlanner) -> tuple[list[Tensor], _Parts, list[Value]]:
    """Return what a plan wants to have stored; all of it is looked at before the first byte is written."""
    paths = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, int] = {}
    parts: _Parts = []
    found: list[Value] = []
    for item in plan.items:
        fqn = item.index.fqn
        at = name_of(fqn, paths.get(fqn))
        if item.type is WriteItemType.BYTE_IO:
            found.append(Value(item=at.item, name=at.name, path=at.path, data=_encoded(planner, item, at)))
            continue
        part = planner.resolve_data(item)
        box, tensor = _tensor(item, part, at)
        assert isinstance(part, torch.Tensor)
        numbers.setdefault(fqn, len(numbers))
        if tensors.setdefault(fqn, tensor) != tensor:
            raise UsageError(f"{fqn} has parts of several shapes or dtypes", kind=ErrorKind.UNSAVEABLE)
        parts.append((numbers[fqn], box, part))
    return list(tensors.values()), parts, found


def _tensor(item: WriteItem, part: object, at: Name) -> tuple[Box, Tensor]:
    said = item.tensor_data
    assert said is not None, "DCP says so of every tensor"
    fqn = item.index.fqn
    why = why_unsaveable(part) if isinstance(part, torch.Tensor) else f"a {type(part).__qualname__}"
    if why is not None or not isinstance(part, torch.Tensor):
        raise UsageError(f"{fqn} is {why}, which cannot be saved", kind=ErrorKind.UNSAVEABLE)
    box = Box(tuple(said.chunk.offsets), tuple(said.chunk.sizes))
    if tuple(part.shape) != box.size:
        raise UsageError(
            f"{fqn} was planned as {list(box.size)} and is now {list(part.shape)}", kind=ErrorKind.UNSAVEABLE
        )
    dtype = dtype_name(part.dtype)
    return box, Tensor(item=at.item, name=at.name, path=at.path, dtype=dtype, shape=tuple(said.size))


def _encoded(planner: SavePlanner, item: WriteItem, at: Name) -> bytes:
    fqn = item.index.fqn
    try:
        return values.encode(_value(planner, item))
    except values.Unsaveable as error:
        raise unsaveable(at.item, at.name, error) from None
    except (Refused, CorruptError) as error:
        what = error.what if isinstance(error, Refused) else "bytes that are no value"
        raise UsageError(f"{fqn}: the planner gives {what}, which cannot be saved", kind=ErrorKind.UNSAVEABLE) from None


def _value(planner: SavePlanner, item: WriteItem) -> object:
    """Return the object that an entry is; a planner that turns it into something else has the last word."""
    if isinstance(planner, DefaultSavePlanner):
        kind = type(planner)
        own = kind.resolve_data, kind.transform_object
        if own == (DefaultSavePlanner.resolve_data, DefaultSavePlanner.transform_object):
            return planner.lookup_object(item.index)  # else it would be pickled, in memory
    given = planner.resolve_data(item)
    return read_value(given.getvalue(), item.index.fqn) if isinstance(given, io.BytesIO) else given


def _receipt(ticket: Ticket, tensors: list[Tensor], found: list[Value], sender: Sender) -> Receipt:
    items = dict.fromkeys([*(each.item for each in tensors), *(each.item for each in found)])
    attempt = ticket.attempt
    return Receipt(
        step=attempt.step,
        generation=attempt.generation,
        nonce=attempt.nonce,
        rank=ticket.rank,
        world_size=ticket.world_size,
        items=tuple(Item(name, "mapping") for name in items),
        tensors=tuple(tensors),
        objects=tuple(sender.objects),
        chunks=Chunks.of(sender.chunks),
        values=tuple(found),
    )


def _nbytes(item: WriteItem) -> int:
    return item.tensor_storage_size() or 0
