"""What a rank leaves of the failure that it sees: its own, in its words, and the end of others of its machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Final, Protocol, Self

from resilient.catalog.evidence import write_evidence
from resilient.catalog.process import host
from resilient.clock import Clock, Deadline, rfc3339
from resilient.config import Process
from resilient.errors import ResilientError
from resilient.events import Bus, Event, Notice
from resilient.format.evidence import IN_FULL, Evidence
from resilient.policy.failures.reading import read
from resilient.policy.failures.rules import RULES, Role
from resilient.run import witness_kernel as kernel
from resilient.run.opening import Opened
from resilient.run.stopped import Stopped
from resilient.run.witness_traceback import frames, frames_now, section, words
from resilient.run.witness_watch import Neighbor, Watch

_FRAMES_OF_SECONDARY: Final = 12
_TAKES_S: Final = 10.0
_DONE: Final = "exit code 0"
_MOMENT_S: Final = 0.02


class Stepping(Protocol):
    """What counts steps: a run."""

    @property
    def step(self) -> int: ...


class Witness:
    """Writes records of a failure under ``control/evidence/``, as long as the training function of a run is entered.

    A store that is away delays the end of this process by no more than 10 seconds. When another rank has ended, an
    agent ends this one soon, and this package then leaves at once, with a last word on the bus: which waits for the
    records.
    """

    def __init__(self, opened: Opened, process: Process, *, bus: Bus, clock: Clock) -> None:
        self._opened = opened
        self._bus = bus
        self._closing = ExitStack()
        self._clock = clock
        self._first_rank = max(0, opened.peers.rank - process.local_rank)
        self._local_world_size = process.local_world_size
        self._oom_kills = kernel.oom_kills()
        self._stderr = kernel.stderr_file()
        self._writing: list[threading.Thread] = []
        self._last: Deadline | None = None
        self._failed = False
        self._said, self._told = threading.Event(), threading.Event()  # unless a thread is about to start to write
        self._said.set()
        self._told.set()
        self._thread = threading.get_ident()
        self._was_there = False
        topic = f"witness/{opened.claim.generation}-{opened.claim.nonce}"
        self._watch = Watch(opened.peers, topic, process, self._see)

    def __enter__(self) -> Self:
        """Watch the other ranks of this machine from now on."""
        self._closing.callback(self._bus.subscribe(self._wait))
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Watch no more; wait for what is being written, since the failure 10 seconds at most."""
        self._closing.close()
        self._watch.close()
        self._settle()

    @contextmanager
    def listening(self, run: Stepping) -> Iterator[None]:
        """Note how a training function is left: by a failure before anything else is done about it, in a thread."""
        try:
            yield
        except Stopped:
            self._watch.close()
            raise
        except BaseException as error:
            if isinstance(error, SystemExit) and error.code in (None, 0):
                self._watch.close()  # as planned, on all ranks
                raise
            self._said.clear()
            self._last = self._last or Deadline(self._clock, _TAKES_S)
            self._failed = True
            try:
                evidence = self._of(error, run.step)
                if evidence is not None:
                    self._start(evidence)
            except Exception as broken:  # noqa: BLE001 -- boundary: the error of the user must get out
                self._bus.emit(Notice(rank=self._opened.peers.rank, message=f"no evidence is kept: {broken!r}"))
            finally:
                self._said.set()
            raise
        self._watch.close()  # from now on others may end as they should

    def _of(self, error: BaseException, step: int) -> Evidence | None:
        """Return the record of a failure; None for a mere follower among very many."""
        lines, where = words(error), frames(error)
        reading = read(lines, RULES)
        secondary = reading is not None and reading.role is Role.SECONDARY
        if secondary and self._opened.peers.rank >= IN_FULL:
            return None
        return self._record(
            rank=self._opened.peers.rank,
            pid=os.getpid(),
            lines=lines,
            frames=where[-_FRAMES_OF_SECONDARY:] if secondary else where,
            section=section(error),
            step=step,
            stderr=kernel.tail(self._stderr),
        )

    def _see(self, neighbor: Neighbor, how: str) -> None:
        """Note the end of a neighbor, in a thread of its own: the next end must not wait for a store that is away."""
        if how == _DONE:
            return  # a run that is complete, and nothing to wait for
        self._told.clear()
        self._last = self._last or Deadline(self._clock, _TAKES_S)
        line = f"process ended by {how}" if how.startswith(("SIG", "signal")) else f"process ended with {how}"
        evidence = self._record(
            rank=neighbor.rank,
            pid=neighbor.pid,
            lines=(line if how else "process ended, nobody saw how",),
            stderr=kernel.tail(neighbor.stderr),
            seen_by=self._opened.peers.rank,
        )
        self._start(evidence)
        self._be_there(neighbor.rank)
        self._told.set()

    def _wait(self, _: Event) -> None:
        if self._last is not None and threading.current_thread() not in self._writing:
            self._settle()

    def _settle(self) -> None:
        last = self._last or Deadline(self._clock, _TAKES_S)
        self._said.wait(last.remaining_s)
        self._told.wait(last.remaining_s)
        for thread in tuple(self._writing):
            thread.join(last.remaining_s)

    def _be_there(self, gone: int) -> None:
        """Leave where this rank is, once: it may be ended before it can tell, and ranks that strayed are known by that.

        A moment later: who was on the way into a collective has come there by then.
        """
        if self._was_there or self._failed or self._opened.peers.rank >= IN_FULL:
            return
        self._was_there = True
        self._clock.sleep(_MOMENT_S)
        self._start(
            self._record(
                rank=self._opened.peers.rank,
                pid=os.getpid(),
                lines=(f"it lived when rank {gone} ended",),
                frames=frames_now(self._thread)[-_FRAMES_OF_SECONDARY:],
                bystander=True,
            )
        )

    def _start(self, evidence: Evidence) -> None:
        thread = threading.Thread(target=self._write, args=(evidence,), name="resilient-evidence", daemon=True)
        self._writing.append(thread)
        thread.start()

    def _write(self, evidence: Evidence) -> None:
        try:
            write_evidence(self._opened.store, evidence)
        except ResilientError:
            return  # the failure itself is what matters; without a store nobody can read of it either

    def _record(self, **about: object) -> Evidence:
        claim = self._opened.claim
        now = self._clock.now()
        return Evidence(
            generation=claim.generation,
            nonce=claim.nonce,
            world_size=self._opened.peers.world_size,
            first_rank=self._first_rank,
            local_world_size=self._local_world_size,
            host=host(),
            clock=kernel.boot(),
            monotonic_s=self._clock.monotonic(),
            wall_s=now.timestamp(),
            created=rfc3339(now),
            oom_kills=max(0, kernel.oom_kills() - self._oom_kills),
            **about,  # type: ignore[arg-type]  # by the two callers above
        )
