"""Copying the state of a step boundary into a slot, most of it while the next turn runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Final, Self, TypeAlias

from torch import Tensor, UntypedStorage

from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.engine.copy_plan import NOTHING, Copies, CopyPlan
from resilient.engine.copying import Copy, CopyJob, Target
from resilient.engine.device_copies import DeviceCopies
from resilient.engine.placement import Placement
from resilient.engine.torn import Probe, versions_of
from resilient.errors import ErrorKind, StoreError
from resilient.state.leaves import Captured, TensorLeaf
from resilient.writer.slot import Slot, Stamp

Submit: TypeAlias = Callable[[Callable[[], object]], None]

_MAX_THREADS: Final = 4
_SHARED_NBYTES: Final = 8 << 20
"""From how many bytes on it pays to wake other threads for a copy that training waits for."""

_COMPARED_SAVES: Final = 2
_COMPARED_SHARE: Final = 16
_SETTLE_TIMEOUT_S: Final = 600.0
_START_TIMEOUT_S: Final = 10.0
_ASKED: Final = ("rng", "stateful")
"""Kinds of items that are asked for their state, and mostly answer with new tensors."""


def copying_threads(local_ranks: int) -> int:
    """Return with how many threads one of the ranks of a host copies what training waits for."""
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // local_ranks))


class Stager:
    """Stages one state after another; owns the copying threads.

    What has to be copied is worked out once for a placement, and looked at again at every save. ``pool`` is what runs
    the copies instead of threads of its own.
    """

    def __init__(
        self, *, threads: int | None = None, pool: Executor | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._threads = threads or copying_threads(1)
        self._pool = pool or _started_pool(self._threads)
        self._clock = clock
        self._samples = Slot.create("samples")
        self._plan: CopyPlan | None = None
        self._planning = threading.Lock()
        self._last: Staging | None = None
        self._count = 0

    def prepare(self, captured: Captured, placement: Placement, overlapped: Collection[int] = ()) -> None:
        """Work out what `stage` will copy, so that the first save costs no more than the others; from any thread."""
        self._copies(captured, placement, overlapped)

    def stage(
        self,
        captured: Captured,
        placement: Placement,
        slot: Slot,
        *,
        generation: int,
        step: int,
        overlapped: Collection[int] = (),
    ) -> Staging:
        """Begin to copy a state into a free slot: return when all is copied but the leaves in ``overlapped``.

        Those are copied by a thread meanwhile, and must not change before `Staging.fence` has returned. ``overlapped``
        are indexes into ``captured.tensors``.

        Raises:
            StoreError: the memory of a tensor is gone. Whatever is raised, also by a signal handler, nothing is read or
                written any more.
        """
        if self._last is not None:
            self._last.settle()
        slot.grow(placement.nbytes)
        copies = self._copies(captured, placement, overlapped)
        slot.begin(generation=generation, step=step)
        compared = self._compared(copies)
        self._count += 1
        staging = self._last = Staging(captured.tensors, copies, slot, self._samples, self._clock)
        try:
            staging.copy_now(captured.locals, self._submit, self._threads)
            self._submit(lambda: staging.finish(compared))
        except BaseException as error:
            staging.give_up(error)
            raise
        return staging

    def close(self) -> None:
        """Finish what is being copied, and end the threads. Idempotent."""
        self._pool.shutdown()
        self._samples.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, call: Callable[[], object]) -> None:
        try:
            self._pool.submit(call)
        except RuntimeError:
            call()  # the interpreter ends, and gives no threads any more

    def _copies(self, captured: Captured, placement: Placement, overlapped: Collection[int]) -> Copies:
        with self._planning:
            plan = self._plan = self._planned(captured, placement, overlapped)
            copies = plan.copies(captured.locals)
            self._samples.grow(sum(probe.nbytes for probe in copies.probes))
            return copies

    def _planned(self, captured: Captured, placement: Placement, overlapped: Collection[int]) -> CopyPlan:
        plan = self._plan
        if plan is None or plan.leaves is not captured.tensors or plan.placement is not placement:
            asked = {item.name for item in captured.items if item.kind in _ASKED}
            moving = frozenset(number for number, leaf in enumerate(captured.tensors) if leaf.item in asked)
            return CopyPlan(captured.tensors, placement, overlapped, moving)
        if plan.overlapped != frozenset(overlapped):
            return CopyPlan(captured.tensors, placement, overlapped, plan.moving)
        return plan

    def _compared(self, copies: Copies) -> Sequence[Copy]:
        """Return which copies are compared with what is there afterwards: the first saves' all, then a share."""
        if self._count < _COMPARED_SAVES:
            return copies.later
        return copies.later[self._count % _COMPARED_SHARE :: _COMPARED_SHARE]


class Staging:
    """One state on its way into a slot; `Stager.stage` makes it.

    ``done`` completes when the slot is sealed, or with the error that the save fails with. ``torn`` are the item and
    name of each tensor that has changed while it was copied, once ``done`` is complete.
    """

    def __init__(self, leaves: Sequence[TensorLeaf], copies: Copies, slot: Slot, samples: Slot, clock: Clock) -> None:
        self.done: Future[Stamp] = Future()
        self.torn: frozenset[tuple[str, str]] = frozenset()
        self._leaves = leaves
        self._copies = copies
        self._slot = slot
        self._samples = samples
        self._clock = clock
        self._target = Target(slot)
        self._device = DeviceCopies()
        self._now = CopyJob(copies.now, self._copy_at_once)
        self._later = CopyJob(copies.later, self._copy)
        self._changed: set[int] = set()
        self._tensors: dict[int, Tensor] = {}
        self._versions: dict[int, int] = {}
        # A storage that the program drops or swaps stays, as it is, until it is copied.
        self._storages: dict[int, UntypedStorage] = {}
        self._addresses: dict[int, int] = {}
        self._is_fenced = False
        self._devices_are_to_be_looked_at = bool(copies.device_later)
        self._looking = threading.Lock()  # held while something else than `_later` reads tensors
        self._finishing = threading.Lock()
        self._settled = threading.Event()

    def copy_now(self, locals_: Sequence[Tensor], submit: Submit, threads: int) -> None:
        """Copy what cannot wait, with the help of other threads; remember what the rest is now."""
        copies = self._copies
        self._tensors = {number: locals_[number] for number in copies.later_leaves}
        self._versions = dict(zip(self._tensors, versions_of(self._tensors.values()), strict=True))
        storages = list(map(Tensor.untyped_storage, self._tensors.values()))
        self._storages = dict(zip(self._tensors, storages, strict=True))
        self._addresses = dict(zip(self._tensors, map(UntypedStorage.data_ptr, storages), strict=True))
        for probe, at in self._probes():
            probe.take(self._samples, at)
        if copies.device_now or copies.device_later:
            self._device.start(copies.device_now, self._leaves, locals_, self._target)
            self._device.fence()
            self._device.start(copies.device_later, self._leaves, locals_, self._target)
        if sum(copy.nbytes for copy in copies.now) > _SHARED_NBYTES:
            for _ in range(threads - 1):
                submit(self._now.work)
        self._now.wait(self._clock)
        if self._now.error is not None:
            raise self._now.error

    def finish(self, compared: Sequence[Copy] = ()) -> None:
        """Copy the rest, and find out whether it is the state of the boundary; in a copying thread. Idempotent."""
        with self._finishing:
            if self._settled.is_set():
                return
            try:
                stamp = self._finished(compared)
            except Exception as error:  # noqa: BLE001 -- thread main: the future carries it to whoever waits
                self._let_go()
                self.done.set_exception(error)
            except BaseException as error:
                self._let_go()
                self.done.set_exception(_interrupted(error))  # what ends this thread must not end those that wait
                raise
            else:
                self._let_go()
                self.done.set_result(stamp)

    def give_up(self, why: BaseException) -> None:
        """Copy nothing more; return when no tensor is read, and nothing is written into the slot any more."""
        error = why if isinstance(why, Exception) else _interrupted(why)
        self._now.stop(error)
        self._later.stop(error)
        self.finish()

    def fence(self) -> float:
        """Return when no tensor is read any more, after helping with what is left; say how many seconds it took."""
        started_s = self._clock.monotonic()
        self._is_fenced = True
        self._later.wait(self._clock)
        self._device.fence()
        self._look_at_devices()  # waits for a comparison that has begun, too
        return self._clock.monotonic() - started_s

    def settle(self) -> None:
        """Return when nothing of this staging is in use any more."""
        if not self._settled.wait(_SETTLE_TIMEOUT_S):
            raise StoreError(
                f"the state before is still being copied after {_SETTLE_TIMEOUT_S:g} s: its thread does not run",
                kind=ErrorKind.DEADLINE,
            )

    def _probes(self) -> Iterator[tuple[Probe, int]]:
        at = 0
        for probe in self._copies.probes:
            yield probe, at
            at += probe.nbytes

    def _finished(self, compared: Sequence[Copy]) -> Stamp:
        self._now.wait(self._clock)  # over already, unless `copy_now` was interrupted
        self._later.wait(self._clock)
        self._device.wait()
        if self._later.error is not None:
            raise self._later.error
        self._look_at_devices()
        self._compare(compared)
        for probe, at in self._probes():
            self._changed |= probe.changed(self._samples, at, self._target)
        self.torn = frozenset((self._leaves[number].item, self._leaves[number].name) for number in self._changed)
        if self.torn:
            raise _torn(self._slot.stamp.step, self.torn)
        return self._slot.seal()

    def _copy_at_once(self, copy: Copy) -> None:
        copy.run(self._target)

    def _copy(self, copy: Copy) -> None:
        gone = [number for number in copy.leaves if self._is_freed(number)]
        if gone:
            self._changed.update(gone)  # to read there would end the process
        else:
            copy.run(self._target)
            self._look_at_leaves(copy.leaves)

    def _is_freed(self, number: int) -> bool:
        return self._storages[number].data_ptr() != self._addresses[number]

    def _look_at_leaves(self, numbers: Sequence[int]) -> None:
        versions = versions_of([self._tensors[number] for number in numbers])
        for number, version in zip(numbers, versions, strict=True):
            if version != self._versions[number]:
                self._changed.add(number)

    def _look_at_devices(self) -> None:
        """Look, once, at what accelerators copy: what training asks of them after the fence comes after the copies."""
        with self._looking:
            if self._devices_are_to_be_looked_at:
                self._look_at_leaves([run.leaf for run in self._copies.device_later])
                self._devices_are_to_be_looked_at = False

    def _compare(self, compared: Sequence[Copy]) -> None:
        for copy in compared:
            with self._looking:
                if self._is_fenced:
                    return
                if not any(map(self._is_freed, copy.leaves)):
                    self._changed.update(copy.changed(self._target))

    def _let_go(self) -> None:
        self._now.forget()
        self._later.forget()
        self._copies = NOTHING
        self._tensors = {}
        self._storages = {}
        self._settled.set()


def _started_pool(threads: int) -> ThreadPoolExecutor:
    """Return a pool whose threads run: to start them at the first save would hold it up while slots are touched."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="resilient-copy")
    together = threading.Barrier(threads, timeout=_START_TIMEOUT_S)
    for _ in range(threads):
        pool.submit(together.wait)  # none is free for the next one before all of them run
    return pool


def _interrupted(by: BaseException) -> StoreError:
    return StoreError(f"copying tensors was interrupted by {type(by).__name__}", kind=ErrorKind.SAVE_FAILED)


def _torn(step: int, torn: Collection[tuple[str, str]]) -> StoreError:
    first, *more = sorted(f"{item}: {name}" for item, name in torn)
    others = f" (and {len(more)} other tensors)" if more else ""
    return StoreError(
        f"{first}{others} changed while step {step} was copied, so what is copied is of no step",
        kind=ErrorKind.SAVE_FAILED,
        hint="from now on it is copied before the boundary returns; what changes tensors otherwise than by"
        " optimizer.step() should call run.fence() first, or overlap=False turns overlapping off",
    )
