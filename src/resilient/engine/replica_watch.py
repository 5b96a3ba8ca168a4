"""Comparing replicas of parameters while a run goes on: what silently changes in one of them is noticed.

Every rank adds up the words of its parameters at a boundary, exactly (integers wrap around, so that the order of the
sum does not matter, on any device), and says a digest of the sums to the others through the key-value store. A flipped
bit always changes a sum. Nobody waits: the sums of an accelerator are read a step later, the rest is done by a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Final, TypeAlias

import msgspec
import torch
from torch import nn

from resilient.clock import Clock, Deadline
from resilient.engine.division import is_plain
from resilient.engine.peers import Peers
from resilient.errors import PeerError, ResilientError
from resilient.events import Bus, Notice, ReplicaDiffers
from resilient.format.digest import digest
from resilient.policy.replicas import Difference, differences
from resilient.state.capture import capture
from resilient.state.leaves import Captured, TensorLeaf
from resilient.state.owners import Owners
from resilient.state.tensors import flat

_WAIT_S: Final = 60.0  # for what the other ranks say of the same step
_POLL_S: Final = 0.1
_PLACES: Final = 4
_WORD_NBYTES: Final = 8

Sums: TypeAlias = Mapping[str, torch.Tensor]
"""By group of holders, and of names: one number for each tensor that others hold as well."""


class _Report(msgspec.Struct, array_like=True):
    step: int
    groups: dict[str, bytes]


class ReplicaWatch:
    """Compares the parameters of some modules between the ranks that hold them, twice in ``every`` steps."""

    def __init__(
        self, modules: Mapping[str, nn.Module], peers: Peers, *, every: int, topic: str, bus: Bus, clock: Clock
    ) -> None:
        """``modules``: by the names of their items. ``topic``: of this generation."""
        self._modules = modules
        self._peers = peers
        self._period = max(1, every // 2) if every and peers.world_size > 1 else 0
        self._topic = topic
        self._bus = bus
        self._clock = clock
        self._pending: tuple[int, Sums] | None = None
        self._told: set[Difference] = set()
        self._noticed = False
        self._queue: SimpleQueue[_Report | None] = SimpleQueue()
        # A daemon: it may wait for ranks that never say anything again.
        self._thread = threading.Thread(target=self._work, name="resilient-replicas", daemon=True)
        self.error: BaseException | None = None
        """What has ended the comparisons, if something did."""

    def at_boundary(self, step: int) -> None:
        """Take part in the comparison, if there is one after this step; parameters must not change meanwhile."""
        if not self._period:
            return
        if self._pending is not None:
            at, sums = self._pending
            self._pending = None
            groups = {group: digest(found.cpu().numpy().data.cast("B")) for group, found in sums.items()}
            self._queue.put(_Report(at, groups))
        if step % self._period == 0:
            if self._thread.ident is None:
                self._thread.start()
            try:
                self._pending = (step, self._sums())
            except ResilientError as error:  # a save says it as well, and training goes on there, too
                self._period = 0
                self._notice(error)

    def _sums(self) -> Sums:
        # Of the modules alone: what else is tracked may be slow to tell its state, and is not compared.
        captured = capture(self._modules, rank=self._peers.rank, world_size=self._peers.world_size)
        return sums_of(captured, self._modules)

    @property
    def running(self) -> bool:
        """Whether something may still be told."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Compare no more. Idempotent."""
        self._queue.put(None)

    def _work(self) -> None:
        try:
            while (report := self._queue.get()) is not None:
                try:
                    self._peers.publish(self._place(report.step, self._peers.rank), msgspec.msgpack.encode(report))
                    if self._peers.rank == 0:
                        self._compare(report)
                except PeerError as error:  # the next comparison may find the store again
                    self._notice(error)
        except BaseException as error:  # noqa: BLE001 -- boundary: thread main, the error is kept
            self.error = error

    def _notice(self, error: ResilientError) -> None:
        if not self._noticed:
            self._noticed = True
            message = f"replicas were not compared, of which nothing more is said here: {error}"
            self._bus.emit(Notice(rank=self._peers.rank, message=message))

    def _place(self, step: int, rank: int) -> str:
        # Used again and again, for the store forgets nothing; several, for a rank may be ahead of who reads.
        return f"{self._topic}/{rank}/{step // self._period % _PLACES}"

    def _compare(self, mine: _Report) -> None:
        deadline = Deadline(self._clock, _WAIT_S)
        reports = {0: mine.groups}
        for rank in range(1, self._peers.world_size):
            while True:
                answer = self._peers.fetch(self._place(mine.step, rank), deadline.remaining_s)
                found = None if answer is None else msgspec.msgpack.decode(answer, type=_Report)
                if found is None or found.step > mine.step:
                    return  # somebody is silent, or far ahead of this thread: the next comparison is as good
                if found.step == mine.step:
                    reports[rank] = found.groups
                    break
                if deadline.expired:
                    return
                self._clock.sleep(_POLL_S)
        for each in differences(reports):
            if each not in self._told:
                self._told.add(each)
                self._bus.emit(ReplicaDiffers(step=mine.step, holders=each.holders, ranks=each.minority))


@torch.no_grad()
def sums_of(captured: Captured, modules: Mapping[str, nn.Module]) -> Sums:
    """Return the sums of what other ranks hold as well, by group of holders; those of an accelerator stay there.

    Of parameters alone: the buffers of a BatchNorm are each rank's own between two forward passes.
    """
    named = Owners(modules).parameters
    parameters = {name for name, each in named.items() if isinstance(each, nn.Parameter)}
    groups: dict[str, tuple[list[str], list[torch.Tensor]]] = {}
    for leaf, local in zip(captured.tensors, captured.locals, strict=True):
        if f"{leaf.item}.{leaf.name}" in parameters and _has_replicas(leaf):
            names, sums = groups.setdefault(_group(leaf), ([], []))
            names.append(f"{leaf.item}/{leaf.name}{leaf.box.offset}")
            sums.append(word_sum(local))
    return {
        f"{holders}/{digest(chr(10).join(names).encode()).hex()}": torch.stack(sums)
        for holders, (names, sums) in groups.items()
    }


def word_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bytes, taken as words of 64 bits where they are aligned so; it wraps around."""
    raw = flat(tensor.detach()).view(torch.uint8)
    whole = raw.numel() // _WORD_NBYTES * _WORD_NBYTES if raw.storage_offset() % _WORD_NBYTES == 0 else 0
    rest = raw[whole:].sum(dtype=torch.int64)
    return rest + raw[:whole].view(torch.int64).sum() if whole else rest


def _has_replicas(leaf: TensorLeaf) -> bool:
    if leaf.alias is not None or leaf.rank is not None:
        return False
    return is_plain(leaf) or (leaf.holders is not None and len(leaf.holders) > 1)


def _group(leaf: TensorLeaf) -> str:
    # Of a plain tensor nobody knows the holders: those that have the same names are compared.
    return "plain" if leaf.holders is None else ",".join(map(str, leaf.holders))
