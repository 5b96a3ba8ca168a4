"""Writing down what happens on this rank, beside the checkpoints, while training goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

from resilient import events
from resilient.catalog.journals import remove_old_records
from resilient.catalog.process import host
from resilient.clock import Clock
from resilient.config import Settings
from resilient.errors import ResilientError
from resilient.format import layout
from resilient.format.journal import Header
from resilient.observe.journal import Journal
from resilient.run.opening import Opened
from resilient.run.promised import Promised
from resilient.run.sections import Spent
from resilient.run.stopped import Stopped
from resilient.store.base import Store
from resilient.store.retrying import Retrying

_IMPORTANT: Final = (
    events.GenerationStarted,
    events.Restored,
    events.SaveFailed,
    events.HangFound,
    events.FailureExplained,
    events.NumericFault,
    events.ReplicaDiffers,
    events.StopAsked,
    events.Stopped,
    events.Ended,
)
"""What is written down within a second; the rest waits for the next time."""

_SOON_S: Final = 1.0
_FEW_RANKS: Final = 64
"""From so many ranks on, those but rank 0 write so much less often that all together write as often as these."""

_AGING: Final = 1e-3
"""Of the age of a life: steps are written down no more often than that: months make hardly more lines than days."""

_LAST_S: Final = 10.0
_SAVING: Final = (events.SaveStarted, events.SaveFenced)


class Stepping(Protocol):
    """What counts steps: a run."""

    @property
    def step(self) -> int: ...


class Telling:
    """A thread that writes the journal of one life of this rank. A store that is away costs training nothing."""

    def __init__(self, opened: Opened, settings: Settings, *, bus: events.Bus, clock: Clock) -> None:
        self._opened = opened
        self._bus = bus
        self._clock = clock
        self._rank = opened.peers.rank
        scale = 1.0 if self._rank == 0 else max(1.0, opened.peers.world_size / _FEW_RANKS)
        self._every_s = scale * settings.journal_every_s
        self._journal = Journal(clock, important=lambda event: isinstance(event, _IMPORTANT))
        self._header = _header(opened, settings, clock)
        self._store = _hasty(opened.store, self._every_s)
        self._promised = Promised(opened, settings, bus=bus, clock=clock)
        self._saved_s, self._told_saved_s = 0.0, 0.0
        self._told = Spent()
        self._kept_s = self._began_s = clock.monotonic()
        self._held: events.StepsTaken | None = None
        self._leaving = self._last_word = False
        self._done_at: int | None = None
        self._counting = threading.Lock()
        self._failing = False
        self._ended = threading.Event()
        self._unsubscribe: Callable[[], None] = _nothing
        self._thread = threading.Thread(target=self._run, name="resilient-journal", daemon=True)
        self._looking: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Write down from now on."""
        self._unsubscribe = self._bus.subscribe(self._take)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write down what is left, for 10 seconds at most."""
        if self._done_at is not None and isinstance(error, SystemExit) and error.code not in (None, 0):
            # The training function had ended as planned, and what it had reached could not be saved.
            why = f"exit code {error.code}: the last step is not saved"
            self._bus.emit(events.Ended(rank=self._rank, step=self._done_at, how="failed", error=why))
        self._ended.set()
        self._journal.wake.set()
        self._thread.join(_LAST_S)
        self._unsubscribe()

    @contextmanager
    def following(self, run: Stepping) -> Iterator[None]:
        """Note how a training function is left, and with which step."""
        try:
            yield
        except Stopped:
            self._end(run.step, "stopped", "")
            raise
        except BaseException as error:
            planned = isinstance(error, SystemExit) and error.code in (None, 0)
            self._end(run.step, "done" if planned else "failed", "" if planned else f"{type(error).__name__}: {error}")
            raise
        self._end(run.step, "done", "")

    def _end(self, step: int, how: str, error: str) -> None:
        self._leaving = True
        self._done_at = step if how == "done" else None
        self._count()
        if self._held is not None:
            self._journal(self._held)
            self._held = None
        self._bus.emit(events.Ended(rank=self._rank, step=step, how=how, error=error[:1000]))

    def _take(self, event: events.Event) -> None:
        if isinstance(event, events.SaveStarted):
            self._saved_s += event.stall_s
        elif isinstance(event, events.SaveFenced):
            self._saved_s += event.waited_s
        self._last_word |= isinstance(event, events.Stopped)  # this process may be ended at any moment now
        if isinstance(event, events.ShareLooked):
            return  # it comes from journals
        kept = self._joined(event) if isinstance(event, events.StepsTaken) else event
        if kept is not None:
            self._journal(kept)

    def _joined(self, taken: events.StepsTaken) -> events.StepsTaken | None:
        """Return a report of steps with those that were held back before it; None if it is held back as well."""
        held, self._held = self._held, None
        if held is not None:
            taken = replace(
                taken,
                steps=held.steps + taken.steps,
                turn_s=held.turn_s + taken.turn_s,
                data_s=held.data_s + taken.data_s,
                save_s=held.save_s + taken.save_s,
            )
        now_s = self._clock.monotonic()
        if self._leaving or now_s - self._kept_s >= _AGING * (now_s - self._began_s):
            self._kept_s = now_s
            return taken
        self._held = taken
        return None

    def _count(self) -> None:
        """Say what steps were taken since this was last said, unless there was none."""
        with self._counting:
            spent, saved_s = self._opened.counter.spent, self._saved_s
            before, self._told = self._told, spent
            if spent.turns == before.turns:
                return
            save_s, self._told_saved_s = saved_s - self._told_saved_s, saved_s
        self._bus.emit(
            events.StepsTaken(
                rank=self._rank,
                step=spent.step,
                steps=spent.turns - before.turns,
                turn_s=spent.turn_s - before.turn_s,
                data_s=spent.data_s - before.data_s,
                save_s=save_s,
                ended_s=self._clock.now().timestamp() - (self._clock.monotonic() - spent.ended_s),
            )
        )

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._rank == 0:
                # Beside this one: many lives of many ranks take minutes, in which nothing would be written down.
                threading.Thread(target=self._remove_old, name="resilient-records", daemon=True).start()
            while not self._ended.is_set():
                if self._journal.wake.wait(self._every_s) and not self._last_word:
                    self._ended.wait(_SOON_S)  # what comes together is written together
                self._write()
                self._look()
            self._write()
        except Exception as error:  # noqa: BLE001 -- thread main: training goes on without a journal
            self._notice(f"nothing more is written down of this run: {type(error).__name__}: {error}")

    def _remove_old(self) -> None:
        try:
            remove_old_records(self._opened.store)
        except Exception as error:  # noqa: BLE001 -- thread main: the next life removes what stays
            self._notice(f"old journals are not removed: {type(error).__name__}: {error}")

    def _look(self) -> None:
        """Look at the promise, in a thread of its own: to read a long account takes more time than last words have."""
        if self._promised.due(self._began_s) and (self._looking is None or not self._looking.is_alive()):
            self._looking = threading.Thread(target=self._look_now, name="resilient-promise", daemon=True)
            self._looking.start()

    def _look_now(self) -> None:
        try:
            self._promised.look(self._began_s)
        except Exception as error:  # noqa: BLE001 -- thread main: training goes on, whatever its account says
            self._notice(f"the share of productive time is not known: {type(error).__name__}: {error}")

    def _write(self) -> None:
        self._journal.wake.clear()
        self._count()
        try:
            self._journal.write(self._header, self._put, self._delete)
        except ResilientError as error:
            if not self._failing:
                self._notice(f"what happens is kept in memory for now, the store does not take it: {error}")
            self._failing = True
        else:
            self._failing = False

    def _put(self, stream: str, number: int, data: bytes) -> None:
        self._store.put(self._key(stream, number), [data])

    def _delete(self, stream: str, number: int) -> None:
        self._store.delete(self._key(stream, number))

    def _key(self, stream: str, number: int) -> str:
        claim = self._opened.claim
        return layout.journal(claim.generation, claim.nonce, self._rank, stream, number)

    def _notice(self, message: str) -> None:
        self._bus.emit(events.Notice(rank=self._rank, message=message))


def _nothing() -> None:
    return None


def _hasty(store: Store, within_s: float) -> Store:
    """Return a store that gives up soon: the next try writes the same, and more."""
    return store.within(within_s) if isinstance(store, Retrying) else store


def _header(opened: Opened, settings: Settings, clock: Clock) -> Header:
    claim = opened.claim
    now_s = clock.now().timestamp()
    return Header(
        run_id=opened.run_id,
        generation=claim.generation,
        nonce=claim.nonce,
        launch=claim.launch,
        rank=opened.peers.rank,
        world_size=opened.peers.world_size,
        host=host(),
        pid=os.getpid(),
        process_began_s=now_s - _age_s(),
        began_s=now_s,
        sla=settings.sla,
    )


def _age_s() -> float:
    """Return for how long this process exists; 0 where the kernel does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, up_s - ticks / os.sysconf("SC_CLK_TCK"))
