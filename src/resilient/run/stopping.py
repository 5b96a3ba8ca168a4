"""Stopping on notice: whoever asks whichever rank, all stop at one step, save it, and leave in time."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Final, NoReturn

from resilient import events
from resilient.clock import Clock, Deadline
from resilient.config import Settings, read_process
from resilient.detect.notice import Notice
from resilient.engine.handle import SaveHandle
from resilient.errors import PeerError, ResilientError
from resilient.run.exits import note_begun
from resilient.run.failures import is_secondary
from resilient.run.grace import GraceCheck, grace_of
from resilient.run.loader_workers import LoaderWorkers
from resilient.run.opening import Opened
from resilient.run.parking import PEER_FAILED_S, RESIZE_S, park
from resilient.run.saved import Saved
from resilient.run.siblings import Siblings
from resilient.run.stop_agreement import Ask, StopAgreement, Word
from resilient.run.stop_sources import StopSources
from resilient.run.stopped import Stopped
from resilient.state.leaves import Captured

_IDLE_S: Final = 0.25
_BUSY_S: Final = 0.01
_RANKS_PER_S: Final = 20_000  # looks into the key-value store, which one process answers
_SLICE_S: Final = 0.2
_LEAVE_S: Final = 30.0
_KILLED: Final = 143  # what a shell says of a process that SIGTERM has ended


class Stopping:
    """One rank's part in a stop. All of it happens on a thread of its own, but for `depart` and `leave`."""

    def __init__(
        self,
        opened: Opened,
        settings: Settings,
        saved: Saved,
        *,
        standing: Callable[[], str],
        bus: events.Bus,
        clock: Clock,
    ) -> None:
        """``standing`` says, for people, where the training is and what is saved."""
        self._peers = opened.peers
        self._late = opened.late
        self._settings = settings
        self._process = read_process()
        self._saved = saved
        self._standing = standing
        self._bus = bus
        self._clock = clock
        self._grace = grace_of(settings, self._process)
        launched = self._process.elastic_id is not None
        self._check = GraceCheck(self._grace, settings, opened.peers, launched=launched, bus=bus)
        self._sources = StopSources(
            opened, settings, self._process, grace_s=self._grace.seconds, notice=self._notice, clock=clock
        )
        self._topic = f"stop/{opened.claim.generation}-{opened.claim.nonce}"
        self._agreement = StopAgreement(opened.peers, self._topic, clock, notice=self._notice)
        self._siblings = Siblings(
            opened.peers,
            f"{self._topic}/who",
            local_rank=self._process.local_rank,
            local_world_size=self._process.local_world_size,
        )
        self._siblings.introduce()  # now: no rank gets through `start` before all have come as far as this
        self._loaders: LoaderWorkers | None = None
        self._wanted: Ask | None = None
        self._deadline: Deadline | None = None
        self._warned = self._unreachable = self._leaving = self._failed = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="resilient-stopping", daemon=True)

    def start(self, step: int, captured: Captured, items: Mapping[str, object]) -> None:
        """Begin to listen, ``step`` steps being complete; before that, signals do what they always did."""
        self._check.estimate(captured, items)
        self._agreement.start(step)
        note_begun(self._process)
        self._sources.start()
        self._loaders = LoaderWorkers(self._sources.signals.numbers)
        self._loaders.install()
        self._thread.start()

    def depart(self, step: int) -> Word | None:
        """Return the word to stop, if no turn is to begin after ``step`` complete steps; on the training thread."""
        return self._agreement.depart(step)

    def leave(self, handle: SaveHandle, word: Word) -> NoReturn:
        """Wait for the commit of the last step as long as there is time, and end this rank; on the training thread."""
        self._leaving = True
        ask = word.ask
        if ask.within_s is not None:
            self._hurry(ask.within_s)
        error = self._outcome(handle, ask, Deadline(self._clock, self._settings.commit_timeout_s))
        self._heed_agent(ask)
        self._bus.emit(
            events.Stopped(
                rank=self._peers.rank,
                step=handle.step,
                kind=ask.kind,
                why=ask.why if ask.rank == self._peers.rank else f"{ask.why} (rank {ask.rank})",
                error=error,
                newest=handle.step if error is None else self._saved.newest,
            )
        )
        node = self._sources.node
        if ask.kind == "resize" and node is not None and signal.SIGTERM not in self._sources.heard:
            self._end_listening()
            step = handle.step if error is None else None
            park(
                node,
                "resize",
                local_rank=self._process.local_rank,
                step=step,
                timeout_s=RESIZE_S,
                clock=self._clock,
            )
            raise Stopped(together=False)
        raise Stopped(together=error is None and self._take_leave())

    def fail(self, error: BaseException) -> None:
        """Begin to end because of an error: signals do again what they did before.

        If it follows from the failure of another rank, the agent is told, and this waits until it restarts its workers:
        a worker that ends by itself costs its node one of the restarts that there are.
        """
        self._failed = True
        self._end_listening()
        node = self._sources.node
        if node is not None and is_secondary(error) and signal.SIGTERM not in self._sources.heard:
            self._notice(f"another rank has failed, this one waits for its agent: {error}")
            park(
                node,
                "peer-failed",
                local_rank=self._process.local_rank,
                step=None,
                timeout_s=PEER_FAILED_S,
                clock=self._clock,
            )

    def finish(self) -> None:
        """Begin to end as planned: there is no further step at which to stop."""
        self._leaving = True

    def close(self, *, leaving: bool) -> None:
        """Listen no more, and put everything back as it was; ``leaving``: because of a stop.

        A signal that came too late for a stop is to be sent again: the program may have more to do than this run.
        """
        agent_ends_others = leaving and self._process.elastic_id is not None
        self._end_listening(ignore=agent_ends_others)
        self._sources.close()
        if self._sources.heard and not leaving and not self._failed:
            self._late.append(min(self._sources.heard))

    @property
    def remaining_s(self) -> float:
        """How long until this process is ended by force, as far as that is known."""
        return _LEAVE_S if self._deadline is None else min(_LEAVE_S, self._deadline.remaining_s)

    def _end_listening(self, *, ignore: bool = False) -> None:
        self._leaving = True
        self._ended.set()
        self._sources.signals.wake()
        if self._thread.is_alive():
            self._thread.join(2 * _IDLE_S)
        # The first worker that has left is a reason for an agent to end the others, which are about to leave as well.
        self._sources.signals.restore(ignore=ignore)
        if self._loaders is not None:
            self._loaders.close()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._ended.is_set():
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 -- thread main: who listens must not end because of one bad word
                if not self._unreachable:
                    self._notice(f"stop requests cannot be followed: {type(error).__name__}: {error}")
                self._unreachable = True
                self._ended.wait(_IDLE_S)

    def _look(self) -> None:
        pace_s = max(_BUSY_S if self._agreement.busy else _IDLE_S, self._peers.world_size / _RANKS_PER_S)
        notice = self._sources.look(pace_s, save_s=self._check.predicted_s or 0.0)
        node = self._sources.node
        if signal.SIGTERM in self._sources.heard and node is not None and node.restarting():
            self._alone("its agent starts the workers anew")
        if notice is not None:
            self._want(notice)
        try:
            self._agreement.look(self._wanted)
        except PeerError as error:
            self._alone(f"the other ranks cannot be reached ({error})")
            raise
        if self._agreement.word is None and signal.SIGTERM in self._sources.heard:
            gone = self._siblings.gone()
            if gone is not None:
                self._alone(f"rank {gone} is gone")
        self._warn_if_late()

    def _want(self, notice: Notice) -> None:
        if notice.within_s is not None:
            self._hurry(notice.within_s)
        if self._wanted is not None:
            return
        self._wanted = Ask(notice.kind, notice.why, self._peers.rank, notice.within_s)
        self._bus.emit(
            events.StopAsked(rank=self._peers.rank, kind=notice.kind, why=notice.why, within_s=notice.within_s)
        )

    def _hurry(self, within_s: float) -> None:
        deadline = Deadline(self._clock, within_s)
        if self._deadline is None or deadline.remaining_s < self._deadline.remaining_s:
            self._deadline = deadline

    def _alone(self, why: str) -> None:
        """End at once, as SIGTERM would have ended this process without us: no stop can be agreed on any more.

        The training thread may hang in native code, where it waits for the rank that is gone, so nothing is run or
        flushed. The writer finishes what is staged.
        """
        if signal.SIGTERM in self._sources.heard and not self._leaving:
            self._notice(f"SIGTERM, and {why}: ended at once; {self._standing()}")
            os._exit(_KILLED)

    def _warn_if_late(self) -> None:
        """Say what will be lost if the training does not come to the end of a step before it is ended."""
        deadline = self._deadline
        if deadline is None or self._warned or self._leaving:
            return
        if deadline.remaining_s < min(5.0, deadline.timeout_s / 4):
            self._warned = True
            self._notice(
                f"{deadline.remaining_s:.0f} s before the end of the grace time no step has ended: {self._standing()};"
                " what is staged will still be committed, the steps after it are lost if this process is killed now"
            )

    # --- the end ------------------------------------------------------------------------------------------------------

    def _heed_agent(self, ask: Ask) -> None:
        """End at once, as a worker that was killed, if the agent ends the workers that it has asked to park.

        It waits no longer, or another node is gone. To leave with the code for "start me again" would end the whole
        job: the agent itself starts the workers again. The writer finishes what is staged.
        """
        node = self._sources.node
        if ask.kind == "resize" and node is not None and signal.SIGTERM in self._sources.heard and node.restarting():
            self._notice(f"the agent starts the workers anew: ended at once; {self._standing()}")
            os._exit(_KILLED)

    def _outcome(self, handle: SaveHandle, ask: Ask, limit: Deadline) -> str | None:
        """Return None once the step is committed, or why it is not; the time left may shrink meanwhile."""
        while True:
            self._heed_agent(ask)
            left_s = limit.remaining_s
            if self._deadline is not None:
                margin_s = min(2.0, 0.1 * self._deadline.timeout_s)  # to leave
                left_s = min(left_s, self._deadline.remaining_s - margin_s)
            try:
                handle.committed.result(max(0.0, min(_SLICE_S, left_s)))
            except FutureTimeoutError:
                if left_s <= 0:
                    staged = handle.staged.done() and handle.staged.exception() is None
                    return f"not in time, {'the writer goes on with it' if staged else 'and not even staged'}"
            except ResilientError as error:
                return str(error)
            except Exception as error:  # noqa: BLE001 -- boundary: whatever a save fails with is said, and does not keep us
                return f"{type(error).__name__}: {error}"
            else:
                return None

    def _take_leave(self) -> bool:
        """Wait until no rank needs the others any more; say whether all are so far."""
        try:
            self._peers.gather(f"{self._topic}/left", b"", max(1.0, self.remaining_s - 1.0))
        except PeerError as error:
            self._notice(f"not every rank has come to the stop: {error}")
            return False
        return True

    def _notice(self, message: str) -> None:
        self._bus.emit(events.Notice(rank=self._peers.rank, message=message))
