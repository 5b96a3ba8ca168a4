"""Saving one step after another: stage on the training thread, hand over to the writer, follow what becomes of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final

from resilient.clock import SYSTEM_CLOCK, Clock, Deadline
from resilient.engine.agreement import Agreement
from resilient.engine.arena import Arena
from resilient.engine.callbacks import Callbacks
from resilient.engine.freshness import Freshness
from resilient.engine.handle import SaveHandle
from resilient.engine.host_memory import available_nbytes
from resilient.engine.patience import Patience
from resilient.engine.peers import Peers
from resilient.engine.save_settings import SaveSettings, opening
from resilient.engine.saving import STORE, TIERS, Saving, saving_of, still_in_flight
from resilient.engine.stage import Stager, Staging, copying_threads
from resilient.engine.structures import Planned, Structures
from resilient.engine.tiers.near import Near
from resilient.engine.writers import Writers
from resilient.errors import ConflictError, ErrorKind, PeerError, ResilientError, UsageError
from resilient.events import (
    Bus,
    Notice,
    Pruned,
    SaveCommitted,
    SaveFailed,
    SavePersisted,
    SaveStaged,
    SaveStarted,
)
from resilient.format.documents import Claim
from resilient.state.leaves import Captured
from resilient.store.base import Store
from resilient.writer import messages
from resilient.writer.slot import Slot

_WATCH_S: Final = 0.1
_TIERS_S: Final = 2.0  # so long a save waits for a slot that only the tiers need


class Saver:
    """Saves the steps of one generation into one store.

    No call waits for another rank on the thread that trains, and none waits without a deadline. A save that fails
    leaves training as it was: the error is in the handle, in a `SaveFailed` event, and in `failures`. What is staged is
    completed by the writer, also if this process is killed.
    """

    def __init__(
        self,
        store: Store,
        claim: Claim,
        peers: Peers,
        settings: SaveSettings,
        *,
        run_id: str,
        bus: Bus,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._claim = claim
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._rank = peers.rank
        self._process = os.getpid()
        self._agreement = Agreement(claim, peers, timeout_s=settings.agree_timeout_s)
        self._freshness = Freshness(self._agreement, rank=peers.rank, bus=bus)
        self._structures = Structures(
            rank=peers.rank,
            world_size=peers.world_size,
            chunk_nbytes=settings.chunk_nbytes,
            agreement=self._agreement,
        )
        self._arena = Arena(
            slots=settings.staging_slots,
            notice=self._notice,
            available=partial(available_nbytes, settings.local_ranks),
        )
        self._stager = Stager(threads=copying_threads(settings.local_ranks), clock=clock)
        self._tried: set[int] = set()
        self._in_flight: dict[int, Saving] = {}
        self._patience = Patience(settings.commit_timeout_s, clock)
        self._abandoned: set[int] = set()
        self._changed = threading.Condition()
        self._callbacks = Callbacks()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._follow, name="resilient-saver", daemon=True)
        self.newest_committed: int | None = None
        self.failures = 0
        self.last_error: BaseException | None = None
        self.stall_s = 0.0
        self.persist_s = 0.0
        self.reserved_nbytes = 0  # of what this rank stores
        self.near = Near(claim, peers, settings, let_go=self._let_go, bus=bus, clock=clock)
        opened = opening(store, claim, peers, settings, run_id=run_id)
        self._writers = Writers(store, opened, self._arena.slots, self._heard, notice=self._notice, clock=clock)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return bool(self._in_flight)

    def wait_ready(self, timeout_s: float) -> None:
        """Return when the writer has shown that it works: before the first step, not at the first save.

        Raises:
            PeerError: it has not, in time.
        """
        self._writers.wait_ready(timeout_s)

    def reserve(self, captured: Captured, *, more_nbytes: int) -> None:
        """Have memory for saves of such a state touched in the background, ``more_nbytes`` for what it grows by.

        Raises:
            StoreError: kind ``no-space``: there is not enough of it.
        """
        placement = self._structures.plan(captured).placement
        self.reserved_nbytes = placement.stored_nbytes + more_nbytes
        self._arena.prepare(placement.nbytes + more_nbytes)

    def anticipate(self, captured: Captured, *, overlapped: Collection[int]) -> None:
        """Prepare, in the background, for saves of states of this structure; return at once.

        All ranks call this at the same step: they compare what they hold.
        """
        self._jobs.put(lambda: self._prepare(captured, overlapped))

    def save(
        self,
        step: int,
        captured: Captured,
        *,
        reason: str,
        metrics: Mapping[str, float] | None = None,
        trained: tuple[int, ...] = (),
        tiers: bool = True,
        overlapped: Collection[int] = (),
        watch: Callable[[Staging], object] = lambda _: None,
    ) -> SaveHandle:
        """Save a state as ``step``; return when all but the ``overlapped`` leaves are copied.

        A slot of the arena must be free for it: if none is, the save in flight is waited for first; if that is not over
        by its own deadline, this one fails.

        Args:
            step: not one that this generation has tried.
            captured: the state.
            reason: for the COMMIT.
            metrics: for the COMMIT, if this rank writes it.
            trained: indexes of the tensors that must have changed since the save before; an alarm tells if none has.
            tiers: also into the tiers; False where the reason or metrics matter, which those do not hold.
            overlapped: indexes of the tensors that the caller keeps as they are until it has called `Staging.fence`.
            watch: is given the copy that is under way.

        Raises:
            ConflictError: this generation has saved that step, or has tried to.
        """
        if step in self._tried:
            # Not even after a failure: receipts of two tries in one attempt could describe two different states.
            raise ConflictError(
                f"this generation has tried already to save step {step}",
                kind=ErrorKind.ALREADY_SAVED,
                hint="save a later step",
            )
        if os.getpid() != self._process:
            raise UsageError(
                f"step {step} cannot be saved by a process that was forked from the one which saves",
                kind=ErrorKind.INVALID_ARGUMENT,
                hint="save in the process that trains",
            )
        started_s = self._clock.monotonic()
        slot = self._free_slot()
        if slot is None:
            # Staging now would put two steps into one checkpoint.
            return self.refuse(step, still_in_flight(self._settings.commit_timeout_s))
        self._tried.add(step)
        handle = SaveHandle(step, call=self._callbacks.call)
        try:
            planned, staging = self._stage(step, captured, slot, overlapped)
        except BaseException as error:  # boundary: whatever a copy raises fails this save, not the training
            self._arena.release(slot)
            self._failed(handle, error, persisted=False)
            if not isinstance(error, Exception):
                raise  # a signal that came meanwhile is the program's
            return handle
        near = self._settings.tiers and (tiers or self.near.has(step))
        needed_by = {STORE, TIERS} if near else {STORE}
        saving = saving_of(handle, captured, planned, staging, started_s, slot, needed_by)
        saving.reason, saving.metrics, saving.trained = reason, dict(metrics or {}), trained
        with self._changed:
            self._in_flight[step] = saving
            self.near.track(saving, self._arena.slots.index(saving.slot))
        self.stall_s = self._clock.monotonic() - started_s
        nbytes = planned.placement.stored_nbytes
        self._bus.emit(SaveStarted(rank=self._rank, step=step, reason=reason, nbytes=nbytes, stall_s=self.stall_s))
        watch(staging)
        self._jobs.put(lambda: self._hand_over(saving))
        return handle

    def keep_near(
        self,
        step: int,
        captured: Captured,
        *,
        overlapped: Collection[int] = (),
        watch: Callable[[Staging], object] = lambda _: None,
    ) -> bool:
        """Stage a state for the tiers of this node alone; say whether that was begun.

        Not where no slot is free, or the tiers are busy: nobody waits. What fails is told, and is no failed save.
        """
        if os.getpid() != self._process:
            return False
        slot = None if self.near.busy else self._arena.free_slot()
        if slot is None:
            self._jobs.put(lambda: self.near.refuse(step))
            return False
        started_s = self._clock.monotonic()
        try:
            planned, staging = self._stage(step, captured, slot, overlapped)
        except BaseException as error:  # boundary: whatever a copy raises costs this state, not the training
            self._arena.release(slot)
            self.near.tell(str(error))
            self._jobs.put(lambda: self.near.refuse(step))
            if not isinstance(error, Exception):
                raise
            return False
        saving = saving_of(SaveHandle(step), captured, planned, staging, started_s, slot, {TIERS})
        with self._changed:
            self.near.track(saving, self._arena.slots.index(saving.slot))
        self.near.stall_s = self._clock.monotonic() - started_s
        watch(staging)
        self._jobs.put(lambda: self._hand_over(saving))
        return True

    def refuse(self, step: int, error: Exception) -> SaveHandle:
        """Record that this rank cannot even begin to save a step, as a failed save like any other."""
        self._tried.add(step)
        handle = SaveHandle(step, call=self._callbacks.call)
        self._failed(handle, error, persisted=False)
        return handle

    def drain(self, timeout_s: float) -> bool:
        """Wait for the saves in flight; say whether none is left."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._in_flight, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Drain, and let the writer go; say whether all is over. Idempotent; nothing is saved afterwards."""
        if os.getpid() != self._process:
            return True  # a forked child has the memory, and not the writer
        deadline = Deadline(self._clock, timeout_s)
        drained = self.drain(timeout_s)
        self._jobs.put(None)
        self._thread.join(deadline.remaining_s)
        closed = self._writers.close(deadline.remaining_s)
        if not self._callbacks.close(deadline.remaining_s):
            self._notice("a callback of a save has not returned; nobody waits for it any longer")
        self.near.close()
        if drained and closed:
            self._stager.close()
            self._arena.close()
        return drained and closed

    def _stage(self, step: int, captured: Captured, slot: Slot, overlapped: Collection[int]) -> tuple[Planned, Staging]:
        planned = self._structures.plan(captured)
        self._arena.fit(slot, planned.placement.nbytes)
        staging = self._stager.stage(
            captured,
            planned.placement,
            slot,
            generation=self._claim.generation,
            step=step,
            overlapped=overlapped,
        )
        return planned, staging

    def _free_slot(self) -> Slot | None:
        deadline = Deadline(self._clock, self._settings.commit_timeout_s)
        with self._changed:
            if not self._changed.wait_for(lambda: self._arena.is_free, min(_TIERS_S, deadline.remaining_s)):
                self.near.give_way()
                self._changed.wait_for(lambda: self._arena.is_free, deadline.remaining_s)
            return self._arena.free_slot()

    # --- the saver's own thread ---------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Hand staged states over in their order, and watch those that are under way."""
        while True:
            try:
                job = self._jobs.get(timeout=_WATCH_S) if self._in_flight or self.near.busy else self._jobs.get()
            except Empty:
                self._watch()
                continue
            if job is None:
                return
            job()
            del job  # it holds what it was about

    def _prepare(self, captured: Captured, overlapped: Collection[int]) -> None:
        try:
            planned = self._structures.anticipate(captured)
            self._arena.prepare(planned.placement.nbytes)
            self._stager.prepare(captured, planned.placement, overlapped)
        except Exception as error:  # noqa: BLE001 -- boundary: if it matters, the first save fails with it
            self._notice(f"the first save will take longer, it could not be prepared: {error}")

    def _hand_over(self, saving: Saving) -> None:
        try:
            sequence = saving.staging.done.result(self._settings.commit_timeout_s).sequence
            structure = self._structures.settle(saving.planned, topic=str(saving.step))
            near = self.near.admit(saving)
            if not (near.tiers or saving.stores):
                return
            order = messages.Save(
                structure=structure.number,
                slot=self._arena.slots.index(saving.slot),
                sequence=sequence,
                step=saving.step,
                reason=saving.reason,
                values=saving.values,
                metrics=saving.metrics,
                trained=self._freshness.numbers(structure, saving.planned.tensors, saving.trained),
                stores=saving.stores,
                tiers=near.tiers,
                complete=near.complete,
                copy_to=near.copy_to,
            )
            if len(self._in_flight) == 1:
                self._patience.begin()
            self._writers.order(structure, order, by=lambda writer: saving.give(writer, self._clock.monotonic()))
        except BaseException as error:  # noqa: BLE001 -- thread main: the handle carries it to whoever waits
            self.near.drop(saving)
            if saving.stores:
                self._over(saving, error, persisted=False)
            else:
                self.near.tell(str(error))

    def _watch(self) -> None:
        """Look whether another rank has given up, or the writer hangs, or a tier."""
        self.near.watch()
        for saving in list(self._in_flight.values()):
            failure = self._agreement.failure(saving.step)
            if failure is not None and saving.step not in self._abandoned:
                self._abandoned.add(saving.step)
                self._writers.abandon(saving.step, failure)
        why = self._patience.at_an_end(list(self._in_flight.values())) if self._in_flight else None
        if why is not None:
            # What it has in hand fails, and the next save goes to a new one.
            self._patience.begin()
            self._notice(f"the writer {why}, and is replaced")
            self._writers.kill()

    # --- what the writer says, on the thread of the link --------------------------------------------------------------

    def _heard(self, writer: int, answer: messages.Answer) -> None:
        if not isinstance(answer, messages.Tiered):  # which says nothing of a save that hangs
            self._patience.begin()
        match answer:
            case messages.Tiered():
                self.near.tiered(answer, stall_s=self.stall_s)
            case messages.Pruned():
                self._bus.emit(Pruned(rank=self._rank, steps=answer.steps))
            case messages.Noticed():
                self._notice(answer.message)
            case messages.Died():
                self._died(writer, answer.why)
            case messages.Copied():
                self.near.copied(answer)
            case messages.Ready():
                self.near.listens(answer)
            case _:
                self._heard_of_save(answer)

    def _heard_of_save(
        self, answer: messages.Taken | messages.Persisted | messages.Committed | messages.Failed
    ) -> None:
        match answer:
            case messages.Taken():
                self._taken(answer.step)
            case messages.Persisted():
                self._persisted(answer)
            case messages.Committed():
                self._committed(answer)
            case messages.Failed():
                saving = self._in_flight.get(answer.step)
                if saving is not None:
                    self._over(saving, answer.error.error(), persisted=answer.persisted)

    def _taken(self, step: int) -> None:
        saving = self._in_flight.get(step)
        if saving is not None and saving.ordered_s is not None and not saving.handle.staged.done():
            duration_s = self._clock.monotonic() - saving.started_s
            self._bus.emit(SaveStaged(rank=self._rank, step=step, duration_s=duration_s))
            saving.handle.staged.set_result(None)

    def _persisted(self, answer: messages.Persisted) -> None:
        saving = self._in_flight.get(answer.step)
        if saving is None:
            return
        self.persist_s = self._clock.monotonic() - saving.started_s
        self._bus.emit(
            SavePersisted(
                rank=self._rank,
                step=answer.step,
                nbytes=answer.nbytes,
                sent=answer.sent,
                cpu_s=answer.cpu_s,
                duration_s=self.persist_s,
            )
        )
        self._let_go(saving, STORE)
        trained, changed = bool(saving.trained), answer.changed
        self._jobs.put(lambda: self._freshness.look(answer.step, trained=trained, changed=changed))
        saving.handle.persisted.set_result(None)

    def _committed(self, answer: messages.Committed) -> None:
        saving = self._in_flight.get(answer.step)
        if saving is None:
            return
        self._structures.committed(saving.planned)
        self.failures = 0
        self.newest_committed = answer.step
        duration_s = self._clock.monotonic() - saving.started_s
        self._bus.emit(SaveCommitted(rank=self._rank, step=answer.step, nbytes=answer.nbytes, duration_s=duration_s))
        saving.handle.committed.set_result(answer.step)
        self._forget(saving)

    def _let_go(self, saving: Saving, who: str) -> None:
        """Free a slot when nobody needs it any more."""
        with self._changed:
            if saving.needed_by:
                saving.needed_by.discard(who)
                if not saving.needed_by:
                    self._arena.release(saving.slot)
                    self._changed.notify_all()

    def _died(self, writer: int, why: str) -> None:
        self.near.died(writer)
        had = [saving for saving in self._in_flight.values() if saving.writer == writer]
        if not had:
            self._notice(f"{why}; it had nothing in hand, and the next save goes to a new one")
        for saving in had:  # what it was not given goes to the next one
            error = PeerError(
                f"step {saving.step} is not saved: {why}",
                kind=ErrorKind.PEER_FAILED,
                hint="the next save goes to a new writer",
                rank=self._rank,
            )
            self._over(saving, error, persisted=saving.handle.persisted.done())

    # --- the end of a save --------------------------------------------------------------------------------------------

    def _over(self, saving: Saving, error: BaseException, *, persisted: bool) -> None:
        """End a save that has failed; what ends it first counts."""
        with self._changed:
            if saving.ended:
                return
            saving.ended = True
        if not persisted:
            self._let_go(saving, STORE)
        self._failed(saving.handle, error, persisted=persisted)
        self._forget(saving)

    def _forget(self, saving: Saving) -> None:
        with self._changed:
            self._in_flight.pop(saving.step, None)
            self._abandoned.discard(saving.step)
            self._changed.notify_all()

    def _failed(self, handle: SaveHandle, error: BaseException, *, persisted: bool) -> None:
        self.failures += 1
        self.last_error = error
        hint = f" (hint: {error.hint})" if isinstance(error, ResilientError) and error.hint else ""
        what = f"{type(error).__name__}: {error}{hint}"
        self._bus.emit(SaveFailed(rank=self._rank, step=handle.step, error=what, failures=self.failures))
        if not persisted:
            self._agreement.tell_failure(handle.step, what)  # else they wait for it until their deadline
        handle.fail(error)

    def _notice(self, message: str) -> None:
        self._bus.emit(Notice(rank=self._rank, message=message))
