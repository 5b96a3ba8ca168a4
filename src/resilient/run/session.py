"""What a training function sees of its run: what to track, the steps, the saves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Final, Self, SupportsFloat, TypeVar

from resilient import events
from resilient.catalog.generations import write_base
from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.config import Settings
from resilient.engine.handle import SaveHandle, committed_handle
from resilient.engine.replica_watch import ReplicaWatch
from resilient.engine.replicas import check_replicas
from resilient.engine.restore import RestoredFrom
from resilient.engine.save_settings import save_settings
from resilient.engine.saver import Saver
from resilient.errors import ResilientError
from resilient.policy.interval import SaveWhen
from resilient.policy.keep import Keep
from resilient.run.boundary import BoundaryWatch
from resilient.run.boundary_state import BoundaryState
from resilient.run.deferral import Deferral
from resilient.run.guard import Guard
from resilient.run.metrics import Metrics
from resilient.run.micro_batches import in_steps
from resilient.run.misuse import already_complete, misused, no_boundary, no_data
from resilient.run.opening import Opened, generation_started, take_leave
from resilient.run.overlap import Overlap
from resilient.run.pace import Pace
from resilient.run.passes import BEGINS_ANEW, position_of, samplers_of, start_pass
from resilient.run.replicas import compared
from resilient.run.restored import Restored
from resilient.run.resuming import Resuming
from resilient.run.sampler import ElasticSampler
from resilient.run.saved import Saved, nothing_to_do
from resilient.run.schedule import schedule_for
from resilient.run.sections import END, RESTORE, SAVE, STOP
from resilient.run.stopped import Stopped
from resilient.run.stopping import Stopping
from resilient.run.tiers import TierSaves
from resilient.run.trained import Trained
from resilient.run.watched import Watched
from resilient.state.capture import capture
from resilient.state.rng import Rng
from resilient.state.to_come import state_to_come

T = TypeVar("T")

_RNG: Final = "rng"
_END: Final = "end"
_LAST_WAIT_S: Final = 30.0
_EMPTY_PASSES: Final = 2
_IDLE_PASSES: Final = 1000  # more than anybody has epochs
_WITH_WARNINGS: Final = 3  # the exit code of a training that finished, but whose end is not saved


class Run:
    """One training across restarts, as the decorated function gets it; `resilient.train` makes it."""

    def __init__(
        self,
        opened: Opened,
        settings: Settings,
        every: SaveWhen,
        keep: Keep,
        *,
        program: str = "",
        bus: events.Bus,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._opened = opened
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._peers = opened.peers
        how = save_settings(settings, keep, opened.local_ranks, opened.tiers.own)
        self._saver = Saver(opened.store, opened.claim, opened.peers, how, run_id=opened.run_id, bus=bus, clock=clock)
        topic = f"schedule/{opened.claim.generation}-{opened.claim.nonce}"
        self._saved = Saved(self._saver, settings, Pace(opened, settings, bus=bus, clock=clock), bus=bus, clock=clock)
        self._schedule = schedule_for(every, opened.peers, topic=topic, clock=clock, skipped=self._saved.skip)
        self._items: dict[str, object] = {}
        self._watch: BoundaryWatch | None = None
        self._overlap: Overlap | None = None
        self._trained: Trained | None = None
        self._boundary: BoundaryState | None = None
        self._rng = Rng()
        self._metrics = Metrics()
        self._resumed: RestoredFrom | None = None
        self._samplers: tuple[ElasticSampler, ...] = ()  # those of the pass that is going on
        self._step = 0
        self._steps_here = 0
        self._in_turn = False
        self._was_left = False
        self._dirty = False
        self._owed = False
        self._deferral = Deferral(self._notice)
        self._total: int | None = None
        self._idle_passes = 0
        self._last_save_s = clock.monotonic()
        self._last_save: SaveHandle | None = None
        self._stopping = Stopping(opened, settings, self._saved, standing=self._standing, bus=bus, clock=clock)
        self._replicas: ReplicaWatch | None = None
        self._guard = Guard(settings, rank=opened.peers.rank, bus=bus)
        self._tiers = TierSaves(opened, settings, self._saver, bus=bus, clock=clock)
        self._resuming = Resuming(opened, settings, program=program, bus=bus, clock=clock)
        self._watched = Watched(opened, settings, bus=bus, clock=clock)  # last: it has a thread
        self._sections = self._watched.sections

    @property
    def step(self) -> int:
        """How many steps are complete, in the whole life of the run."""
        return self._step

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self._peers.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are in this generation."""
        return self._peers.world_size

    @property
    def loss_weight(self) -> float:
        """What to multiply this rank's mean loss with, so that the mean over the ranks is that of the global batch.

        Where gradients are accumulated, of the micro-batch that was taken last: their sum over a step is what counts.
        """
        return self._samplers[0].loss_weight if self._samplers else 1.0

    @property
    def accumulation(self) -> int:
        """How many micro-batches make this step, on every rank: see ``micro_batch`` of `ElasticSampler`."""
        return self._samplers[0].accumulation if self._samplers else 1

    def track(self, **items: object) -> Restored | None:
        """Say what the state of the run is, and bring it back if there is a checkpoint; once, before the first step.

        Args:
            items: modules, optimizers, anything with ``state_dict`` and ``load_state_dict``, or nested
                dictionaries, by name. The random number generators are tracked without being named.

        Returns:
            What was restored, in place; None at a fresh start.

        Raises:
            UsageError: something cannot be saved, or differs from the checkpoint; it is named. Nothing was changed.
            CorruptError: there are checkpoints, and none is usable.
            NotFoundError: there is none, and ``resume`` is "required".
            UsageError: kind ``crash-loop``: the lives before have failed in the same way, again and again.
            ConflictError: kind ``divergent``: the ranks hold different states under one name.
        """
        if self._watch is not None:
            raise misused("run.track was called before", "name all items in one call")
        if _RNG in items:
            raise misused(f"the name {_RNG!r} is taken by the random number generators", "give the item another name")
        self._items = {**items, _RNG: self._rng}
        capture(self._items, rank=self.rank, world_size=self.world_size)
        with self._sections.within(RESTORE):
            self._resumed = self._resuming.resume(self._items)
            restored = capture(self._items, rank=self.rank, world_size=self.world_size)
            check_replicas(restored, self._peers, timeout_s=self._settings.restore_timeout_s)
        commit = self._resumed.commit if self._resumed is not None else None
        if self.rank == 0:
            # Before the first save: what is saved counts only on a line that says where it continues from.
            write_base(self._opened.store, self._opened.claim, commit)
        self._watch = BoundaryWatch(self._items)
        self._overlap = Overlap(self._items, enabled=self._settings.overlap)
        self._trained = Trained(self._items)
        self._replicas = compared(self._items, self._opened, self._settings, bus=self._bus, clock=self._clock)
        self._boundary = BoundaryState(self._items, self._rng, rank=self.rank, world_size=self.world_size)
        self._saver.reserve(restored, more_nbytes=state_to_come(self._items))
        self._saver.wait_ready(self._settings.peer_timeout_s)
        self._step = commit.step if commit is not None else 0
        self._saved.start(None if commit is None else commit.step)
        self._tiers.start(None if commit is None else commit.step)
        self._bus.emit(generation_started(self._opened, None if commit is None else commit.step))
        self._stopping.start(self._step, restored, self._items)
        self._watched.follow(self._items)
        if commit is None:
            return None
        return Restored(
            step=commit.step, generation=commit.generation, world_size=commit.world_size, items=commit.items
        )

    def steps(self, iterable: Iterable[T], total: int | None = None) -> Iterator[T]:
        """Iterate over batches; after each turn of the loop one step is complete.

        Args:
            iterable: a ``DataLoader`` with an `ElasticSampler`, the sampler itself, or anything else that can be
                iterated. If its `ElasticSampler` has a ``micro_batch``, a turn gets the micro-batches of a step.
            total: go round again, epoch after epoch, until that many steps of the run's whole life are complete.
                None: one pass; of a run that has ended normally before, an empty one.

        Raises:
            UsageError: nothing is tracked yet; or the data is empty, pass after pass; or a run that has ended is asked
                for a second pass, without ``total``.
            StoreError: kind ``save-failed``: too many saves in a row failed, or nothing was saved for too long.
        """
        watch = self._tracked()
        tracked = [item for item in self._items.values() if isinstance(item, ElasticSampler)]
        self._samplers = samplers_of(iterable, tracked)
        self._total = total
        if total is None and self._finished():
            self._idle_passes += 1
            if self._idle_passes > _IDLE_PASSES:  # a loop until some epoch would go round for ever
                raise already_complete(self._step)
            return iter(())
        return self._turns(iterable, total, watch)

    def save(self, reason: str = "call") -> SaveHandle:
        """Save the state of the last boundary, now; return when it is copied.

        To be called at the start of a turn, before anything is computed, or outside of the loop: the batch just
        drawn counts as not yet used, and a resume draws it again. A step that is saved already, or is being saved,
        is not saved again: its handle is returned. Within a turn, parameters and optimizers' state are copied while the
        turn goes on, up to the next ``optimizer.step()``: call `fence` before changing them in another way.

        Where no ``torch.optim.Optimizer`` is tracked, the only sign of a step is that tensors of tracked modules and
        dictionaries have changed: what is changed elsewhere, or through ``tensor.data``, goes unnoticed.

        Raises:
            UsageError: kind ``not-a-boundary``: the state is no longer that of the last boundary, or gradients are
                pending.
        """
        watch = self._tracked()
        if self._dirty or (self._in_turn and watch.stepped):
            raise no_boundary(self._step, "the optimizer has stepped since")
        if self._in_turn and watch.changed():
            raise no_boundary(self._step, "tensors that are tracked have changed since")
        if watch.pending():
            raise no_boundary(self._step, "there are gradients that no optimizer step has used yet", watch.advice())
        # Outside of the loop nothing fences: whatever the program does next may change the state.
        return self._handle_of(self._step) or self._save(reason, overlaps=self._in_turn)

    def watch(self, **values: SupportsFloat) -> bool:
        """Say values that a sick step shows, such as ``loss`` and ``grad_norm``; return whether the step may be taken.

        To be called between ``backward`` and ``optimizer.step``, on every rank, with the same names. False: drop the
        gradients and ``continue``. The same batch then comes again (with the same random numbers): what is sick twice
        alike is the step's own, and ends the run, is skipped, or told, as `Settings.on_nonfinite` and `on_spike` say;
        what is not was a fault of the moment, and is told. Waits for an accelerator, and for one small all-reduce.

        Raises:
            FloatingPointError: the step is sick, and the settings say "stop" or "rollback".
            UsageError: a value is no number, or samples are to be skipped that no `ElasticSampler` knows.
        """
        self._tracked()
        return self._guard.watch(values, self._samplers)

    def metrics(self, **values: SupportsFloat) -> None:
        """Say how good the state is, by name, for ``Keep(best=...)``; numbers or tensors of one element.

        What is said within a turn goes into the save at its end, if there is one; what is said right before `save` goes
        into that one. Whichever rank commits stores its own: say on every rank what all agree on, such as a mean.
        """
        self._metrics.report(values)

    def section(self, name: str) -> AbstractContextManager[None]:
        """Name a phase that is no part of a step (evaluation, compilation, ...): errors and hangs in it say so."""
        return self._sections.named(name, lambda: self._step)

    def fence(self) -> None:
        """Wait until the last boundary's state is copied; for code that is about to change it without an optimizer."""
        if self._overlap is not None:
            self._overlap.fence()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _turns(self, iterable: Iterable[T], total: int | None, watch: BoundaryWatch) -> Iterator[T]:
        self._start_steps(iterable, watch)
        empty = 0
        while total is None or self._step < total:
            before = self._step
            try:
                yield from self._one_pass(iterable, total, watch)
            finally:
                self.fence()  # nobody knows what the program does to the state outside of its steps
                self._sections.outside(self._step)
            if total is None:
                return
            empty = empty + 1 if self._step == before else 0
            if empty == _EMPTY_PASSES:
                raise no_data(empty, self._step, total)

    def _start_steps(self, iterable: Iterable[object], watch: BoundaryWatch) -> None:
        boundary = self._boundary_state()
        boundary.follow(position_of(iterable, self._items))
        if self._resumed is not None and self._steps_here == 0:
            # Last of all: what the program drew since run.track must not move the run's own numbers.
            self._rng.restore(self._rng.state, step=self._step, rank=self.rank)
            if self._step and not self._samplers and not boundary.has_loader:
                self._notice(BEGINS_ANEW)
        boundary.hold()
        watch.hold()
        self._schedule.start(self._step)
        self._save_if_owed(watch)

    def _one_pass(self, iterable: Iterable[T], total: int | None, watch: BoundaryWatch) -> Iterator[T]:
        start = partial(start_pass, iterable, self._rng, step=self._step, rank=self.rank)
        for batch in self._sections.turns(lambda: in_steps(start(), self._samplers), lambda: self._step):
            self._stop_if_asked(watch)
            self._in_turn, self._was_left = True, False
            self._metrics.forget()
            try:
                yield from self._guard.tries(batch, self._rng, step=self._step, watch=watch)
            except GeneratorExit:
                self._left_in_turn(watch)
                raise
            self._end_turn(watch)
            self._saved.check()
            self._save_if_due(watch, last_of_pass=total is None and any(each.consumed == 0 for each in self._samplers))
            if total is not None and self._step >= total:
                return

    def _end_turn(self, watch: BoundaryWatch) -> None:
        assert self._overlap is not None
        waited_s = self._overlap.end_turn()
        if self._last_save is not None and self._last_save.step == self._step and waited_s:
            self._bus.emit(events.SaveFenced(rank=self.rank, step=self._step, waited_s=waited_s))
        watch.end_turn()
        self._in_turn = self._dirty = False
        self._step += 1
        self._steps_here += 1
        for sampler in self._samplers:
            sampler.skip() if self._guard.skips else sampler.advance()
        self._boundary_state().hold()
        if self._replicas is not None:
            self._replicas.at_boundary(self._step)
        if self._steps_here == 1:
            self._anticipate()

    def _left_in_turn(self, watch: BoundaryWatch) -> None:
        """The loop was left by ``break``: the turn counts if its steps were done, else its batch is unused."""
        self._was_left = True
        if watch.stepped and not watch.pending():  # of several optimizers, one may still have its step to do
            self._end_turn(watch)
            self._save_if_due(watch, last_of_pass=True)
        self._in_turn = False
        self._dirty = watch.blind or watch.stepped or (watch.pending() and not watch.only_left())

    # --- saving -------------------------------------------------------------------------------------------------------

    def _anticipate(self) -> None:
        """After the first step the optimizers have their state: prepare for its saves."""
        with suppress(ResilientError):  # the first save says it
            captured = self._boundary_state().capture()
            self._saver.anticipate(captured, overlapped=self._overlap.leaves(captured) if self._overlap else ())

    def _save_if_due(self, watch: BoundaryWatch, *, last_of_pass: bool) -> None:
        in_flight = self._last_save.step if self._last_save is not None and self._saver.busy else None
        context = self._saved.pace.context(self._step, saved_s=self._last_save_s)
        self._owed |= self._schedule.due(context, in_flight)
        # At the end of a pass, or where the loop is left, the run may be over, which the checkpoint then says: the save
        # that is owed is made at the end, or when the next pass starts.
        if not last_of_pass:
            self._save_if_owed(watch)
        near = not (last_of_pass or self._dirty or watch.pending()) and self._handle_of(self._step) is None
        self._tiers.at_boundary(context, self._boundary_state(), self._overlap, saves=near)

    def _save_if_owed(self, watch: BoundaryWatch) -> None:
        # Between micro-batches the gradients are state that no checkpoint has.
        if self._owed and not self._dirty and not self._deferral.waits(watch):
            self._owed = False
            if self._handle_of(self._step) is None:
                self._save("interval", overlaps=True)

    def _stop_if_asked(self, watch: BoundaryWatch) -> None:
        """End this rank here if all ranks are to stop after this step; the batch just drawn counts as not used.

        Here alone, before a turn: what the program does between its loops may need all ranks.
        """
        word = self._stopping.depart(self._step)
        if word is not None and not self._dirty and not self._deferral.waits(watch):
            self.fence()
            handle = self._handle_of(self._step) or self._save("stop", overlaps=False)
            with self._sections.within(STOP):
                self._stopping.leave(handle, word)

    def _standing(self) -> str:
        where = f"in section {self._sections.name!r}, " if self._sections.name else ""
        return f"{where}after step {self._step}; {self._saved.summary(self._step)}"

    def _save(self, reason: str, *, overlaps: bool) -> SaveHandle:
        with self._sections.within(SAVE):
            return self._save_now(reason, overlaps=overlaps)

    def _save_now(self, reason: str, *, overlaps: bool) -> SaveHandle:
        self._last_save_s = self._clock.monotonic()
        try:
            captured = self._boundary_state().capture()
        except ResilientError as error:
            # Saveable at track, and not any more. The training is not to blame; the run ends if it stays so.
            self._last_save = self._saver.refuse(self._step, error)
            return self._last_save
        overlap = self._overlap
        assert overlap is not None
        metrics = self._metrics.take()
        self._last_save = self._saver.save(
            self._step,
            captured,
            reason=reason,
            metrics=metrics,
            tiers=reason != _END and not metrics,
            trained=self._trained.take(captured) if self._trained is not None else (),
            overlapped=overlap.leaves(captured) if overlaps else (),
            watch=overlap.watch,
        )
        return self._last_save

    def _handle_of(self, step: int) -> SaveHandle | None:
        if self._resumed is not None and step == self._resumed.commit.step:
            return committed_handle(step)  # this very state is where the run came from
        return self._last_save if self._last_save is not None and self._last_save.step == step else None

    # --- beginning and end --------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the run: after a normal end of the training function save its last step, else finish what is under way.

        Raises:
            SystemExit: 3, if the last step of a training that ended normally could not be saved.
        """
        stopped = isinstance(error, Stopped)
        self._sections.turn_to(END, self._step)
        try:
            if error is not None and not stopped:
                # Before all else: what follows from it on other ranks comes later, and is not the cause.
                self._resuming.tell(error, step=self._step, leave_out=self._guard.left_out(self._items))
                self._stopping.fail(error)
            if self._watch is None or stopped:
                return
            # An exit out of a turn is none at a boundary: a signal's handler may have raised it anywhere.
            within = self._in_turn or self._was_left
            if error is None or (isinstance(error, SystemExit) and not error.code and not within):
                self._stopping.finish()
                self._finish(self._watch)
            else:
                self._saver.drain(min(_LAST_WAIT_S, self._settings.commit_timeout_s))
                summary = self._saved.summary(self._step) + self._saved.counts
                self._notice(f"stopped after step {self._step} by {type(error).__name__}; {summary}")
        finally:
            with ExitStack() as closing:  # each of them, whatever the others raise; the last one first
                closing.callback(self._watched.close)
                closing.callback(self._tiers.close)
                closing.callback(self._stopping.close, leaving=stopped)
                closing.callback(self._saver.close, self._stopping.remaining_s if stopped else _LAST_WAIT_S)
                for each in (self._watch, self._overlap, self._replicas, self._trained):
                    if each is not None:
                        closing.callback(each.close)
                closing.callback(self._schedule.close)

    def _finish(self, watch: BoundaryWatch) -> None:
        if self._steps_here == 0 and self._resumed is not None:
            self._notice(nothing_to_do(self._step, self._total))
            self._tiers.done()
            return
        if self._dirty:
            self._notice(f"the loop was left within a step: step {self._step} is the last that could be saved")
        elif self._steps_here and self._handle_of(self._step) is None:
            if watch.pending():
                why = watch.advice() or "the data ended between micro-batches"
                self._notice(f"gradients that no step of their optimizer has used are not saved: {why}")
            self._save(_END, overlaps=False)
        self._saver.drain(self._settings.commit_timeout_s)
        stayed_away = take_leave(self._opened, self._settings.peer_timeout_s)
        if stayed_away is not None:
            self._notice(stayed_away)
        summary = self._saved.summary(self._step) + self._saved.counts
        self._notice(f"done: {self._steps_here} steps, now at step {self._step}; {summary}")
        if self._steps_here and self._saved.newest != self._step:
            raise SystemExit(_WITH_WARNINGS)
        self._tiers.done()

    def _finished(self) -> bool:
        """Say whether this life started from a checkpoint that was made at the end of the training function."""
        return self._resumed is not None and self._steps_here == 0 and self._resumed.commit.reason == _END

    def _notice(self, message: str) -> None:
        self._bus.emit(events.Notice(rank=self.rank, message=message))

    def _boundary_state(self) -> BoundaryState:
        assert self._boundary is not None, "made by track, as is the watch"
        return self._boundary

    def _tracked(self) -> BoundaryWatch:
        if self._watch is None:
            raise misused("nothing is tracked", "call run.track(model=..., optimizer=..., data=...) first")
        return self._watch
