"""Saving one step after another: stage on the training thread; persist and commit on a thread of the save's own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from resilient.catalog.commit import read_commit, try_commit
from resilient.catalog.line import read_chain, read_line
from resilient.catalog.once import exists
from resilient.catalog.prune import prune
from resilient.clock import SYSTEM_CLOCK, Clock, Deadline
from resilient.engine.division import Piece, divide, signature
from resilient.engine.handle import SaveHandle
from resilient.engine.peers import Peers
from resilient.engine.persist import SMALL_NBYTES, Writer, persist
from resilient.engine.stage import Arena, StagedPiece
from resilient.errors import ConflictError, ErrorKind, PeerError, ResilientError, StoreError
from resilient.events import Bus, Notice, Pruned, SaveCommitted, SaveFailed, SavePersisted, SaveStarted
from resilient.format import layout
from resilient.format.documents import Claim, Commit
from resilient.format.layout import Attempt
from resilient.policy.keep import Keep
from resilient.state.leaves import Captured
from resilient.store.base import Store

_TAKEOVER_S: Final = 2.0
_FIRST_POLL_S: Final = 0.01
_LAST_POLL_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSettings:
    """How saves are made.

    ``chunk_nbytes``: the largest piece with a digest of its own. ``commit_timeout_s``: from the boundary to the commit.
    ``agree_timeout_s``: for the ranks to find out that they hold the same tensors, when those are new. ``keep``: what
    retention leaves; None deletes nothing.
    """

    chunk_nbytes: int = 4 << 20
    commit_timeout_s: float = 600.0
    agree_timeout_s: float = 30.0
    keep: Keep | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Everything that a save needs after the boundary."""

    attempt: Attempt
    reason: str
    captured: Captured
    staged: list[StagedPiece]
    new_structure: bytes | None
    started_s: float


class Saver:
    """Saves the steps of one generation into one store; at most one save is in flight.

    No call waits for another rank on the thread that trains, and none waits without a deadline. A save that fails
    leaves training as it was: the error is in the handle, in a `SaveFailed` event, and in `failures`.
    """

    def __init__(
        self, store: Store, claim: Claim, peers: Peers, settings: SaveSettings, *, bus: Bus, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._store = store
        self._claim = claim
        self._peers = peers
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._writer = Writer(rank=peers.rank, world_size=peers.world_size)
        self._arena = Arena()
        self._agreed: dict[bytes, bool] = {}
        self._thread: threading.Thread | None = None
        self._handles: dict[int, SaveHandle] = {}
        self.newest_committed: int | None = None
        self.failures = 0
        self.last_error: BaseException | None = None
        self.stall_s = 0.0
        self.persist_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, captured: Captured, *, reason: str) -> SaveHandle:
        """Save a state as ``step``: return when it is copied.

        A save that is still in flight is waited for first; if it is not over by its own deadline, this one fails.

        Raises:
            ConflictError: this generation has saved that step, or has tried to.
        """
        if step in self._handles:
            # Not even after a failure: receipts of two tries in one attempt could describe two different states.
            raise ConflictError(
                f"this generation has tried already to save step {step}: {self._handles[step]}",
                kind=ErrorKind.ALREADY_SAVED,
                hint="save a later step",
            )
        if not self.drain(self._settings.commit_timeout_s):
            # Its thread may still read the arena: staging now would put two steps into one checkpoint.
            return self.refuse(step, _still_in_flight(self._settings.commit_timeout_s))
        handle = self._handles[step] = SaveHandle(step)
        started_s = self._clock.monotonic()
        try:
            job = self._stage(step, captured, reason, started_s)
        except Exception as error:  # noqa: BLE001 -- boundary: whatever a copy raises fails this save, not the training
            self._failed(handle, error)
            return handle
        self.stall_s = self._clock.monotonic() - started_s
        handle.staged.set_result(None)
        nbytes = sum(len(each.data) for each in job.staged)
        self._emit_started(step, reason, nbytes)
        # Not a daemon thread: a program that ends without waiting still gets its save.
        self._thread = threading.Thread(target=self._run, args=(job, handle), name=f"resilient-save-{step}")
        self._thread.start()
        return handle

    def refuse(self, step: int, error: Exception) -> SaveHandle:
        """Record that this rank cannot even begin to save a step, as a failed save like any other."""
        handle = self._handles[step] = SaveHandle(step)
        self._failed(handle, error)
        return handle

    def drain(self, timeout_s: float) -> bool:
        """Wait for the save in flight; say whether nothing is in flight any more."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.busy

    def _emit_started(self, step: int, reason: str, nbytes: int) -> None:
        event = SaveStarted(rank=self._writer.rank, step=step, reason=reason, nbytes=nbytes, stall_s=self.stall_s)
        self._bus.emit(event)

    def _stage(self, step: int, captured: Captured, reason: str, started_s: float) -> _Job:
        structure = signature(captured)
        agreed = True if self._writer.world_size == 1 else self._agreed.get(structure)
        pieces = list(self._divide(captured, agreed=bool(agreed)))
        wanted = [piece for piece in pieces if self._is_staged(piece, new=agreed is None)]
        copied = {id(each.piece): each for each in self._arena.stage(captured, wanted)}
        return _Job(
            attempt=Attempt(step=step, generation=self._claim.generation, nonce=self._claim.nonce),
            reason=reason,
            captured=captured,
            staged=[copied.get(id(piece), StagedPiece(piece=piece, data=memoryview(b""))) for piece in pieces],
            new_structure=structure if agreed is None else None,
            started_s=started_s,
        )

    def _divide(self, captured: Captured, *, agreed: bool) -> Sequence[Piece]:
        nbytes = self._settings.chunk_nbytes
        return list(divide(captured, world_size=self._writer.world_size, chunk_nbytes=nbytes, agreed=agreed))

    def _is_staged(self, piece: Piece, *, new: bool) -> bool:
        """Say whether a piece is copied: what this rank stores, and the replicas that the commit is to compare."""
        mine = piece.owner is None or piece.owner == self._writer.rank
        return mine or (piece.replicated and (new or piece.nbytes <= SMALL_NBYTES))

    def _run(self, job: _Job, handle: SaveHandle) -> None:
        try:
            self._persist(job, handle)
            commit = self._commit(job)
            self._prove(commit)
        except BaseException as error:  # noqa: BLE001 -- thread main: the handle carries it to whoever waits
            self._failed(handle, error)
            if isinstance(error, ResilientError) and error.kind in (ErrorKind.NO_SPACE, ErrorKind.PEER_FAILED):
                self._prune()  # what was given up before still takes up the space
            return
        self.failures = 0
        self.newest_committed = commit.step
        duration_s = self._clock.monotonic() - job.started_s
        self._bus.emit(
            SaveCommitted(rank=self._writer.rank, step=commit.step, nbytes=commit.nbytes, duration_s=duration_s)
        )
        handle.committed.set_result(commit.step)
        self._prune()

    def _persist(self, job: _Job, handle: SaveHandle) -> None:
        staged = job.staged
        if job.new_structure is not None and self._agree(job.new_structure, job.attempt):
            # Everything that is held was copied, so only the owners change: each rank now stores its share.
            owned = self._divide(job.captured, agreed=True)
            staged = [replace(each, piece=piece) for each, piece in zip(staged, owned, strict=True)]
        nbytes = persist(self._store, job.attempt, self._writer, job.captured, staged, self._clock)
        self.persist_s = self._clock.monotonic() - job.started_s
        event = SavePersisted(rank=self._writer.rank, step=job.attempt.step, nbytes=nbytes, duration_s=self.persist_s)
        self._bus.emit(event)
        handle.persisted.set_result(None)

    def _agree(self, structure: bytes, attempt: Attempt) -> bool:
        """Find out whether all ranks hold the same plain tensors; a rank that does not answer means no.

        Whatever the ranks conclude, each by itself, is safe: "yes" stores a share, "no" stores all, and the commit
        proves that nothing is missing.
        """
        topic = f"structure/{attempt.generation}-{attempt.nonce}/{attempt.step}"
        try:
            answers = self._peers.gather(topic, structure, self._settings.agree_timeout_s)
        except PeerError:
            return False
        self._agreed[structure] = all(answer == structure for answer in answers)
        return self._agreed[structure]

    def _commit(self, job: _Job) -> Commit:
        """Commit as soon as all receipts are there, or learn that another rank did.

        No rank's death prevents it: rank 0 tries first, the others take over one after another.
        """
        deadline = Deadline(self._clock, self._settings.commit_timeout_s)
        my_turn = Deadline(self._clock, _TAKEOVER_S * self._writer.rank)
        poll_s = _FIRST_POLL_S
        while True:
            outcome = self._try_commit(job) if my_turn.expired else read_commit(self._store, job.attempt)
            if isinstance(outcome, Commit):
                return outcome
            self._raise_if_given_up(job.attempt)
            if deadline.expired:
                raise _not_committed(job.attempt, outcome or (), deadline.timeout_s)
            self._clock.sleep(poll_s)
            poll_s = min(1.5 * poll_s, _LAST_POLL_S)

    def _try_commit(self, job: _Job) -> Commit | tuple[int, ...]:
        return try_commit(
            self._store,
            job.attempt,
            world_size=self._writer.world_size,
            committer=self._writer.rank,
            reason=job.reason,
            clock=self._clock,
        )

    def _prove(self, commit: Commit) -> None:
        """Raise if no reader would count a commit: another launch has taken over, or the run's documents are gone.

        Asks for the documents that decide, not for the whole line: a save must cost the same after a thousand others.
        """
        if self._writer.rank != 0:
            return
        void = f"{self._store.url}: {commit.attempt} is committed and does not count"
        chain = read_chain(self._store, [commit.attempt])
        counts = chain.holds(commit.attempt)
        if not counts and chain.head >= commit.generation:
            raise ConflictError(
                f"{void}: generation {chain.head} has taken over",
                kind=ErrorKind.TAKEN_OVER,
                hint="stop this job: what it saves is lost",
            )
        if not counts or not exists(self._store, layout.RUN):
            gone = layout.RUN if counts else f"{layout.GENERATIONS} or parts of it"
            raise StoreError(
                f"{void}: somebody deleted {gone}",
                kind=ErrorKind.SAVE_FAILED,
                hint="put it back, or save to another place: what is saved here cannot be found",
            )

    def _prune(self) -> None:
        """Apply retention. A failure here is not a failure of the save: it is said, and the next save tries again."""
        if self._settings.keep is None or self._writer.rank != 0:
            return
        try:
            line = read_line(self._store)
            kept = self._settings.keep.kept([commit.step for commit in line.commits])
            done = prune(self._store, line, kept, clock=self._clock)
        except ResilientError as error:
            self._bus.emit(Notice(rank=self._writer.rank, message=f"old checkpoints could not be pruned: {error}"))
            return
        if done.steps:
            self._bus.emit(Pruned(rank=self._writer.rank, steps=done.steps))

    def _failed(self, handle: SaveHandle, error: BaseException) -> None:
        self.failures += 1
        self.last_error = error
        hint = f" (hint: {error.hint})" if isinstance(error, ResilientError) and error.hint else ""
        what = f"{type(error).__name__}: {error}{hint}"
        self._bus.emit(SaveFailed(rank=self._writer.rank, step=handle.step, error=what))
        if not handle.persisted.done():
            self._give_up(handle.step, what)
        handle.fail(error)

    def _give_up(self, step: int, what: str) -> None:
        """Tell the others that this rank's part will not come: else they wait for it until their deadline."""
        try:
            self._peers.publish(self._failures_of(step), f"rank {self._writer.rank}: {what}".encode())
        except PeerError:
            return  # nobody can be told, and the deadline is for that

    def _raise_if_given_up(self, attempt: Attempt) -> None:
        try:
            failure = self._peers.fetch(self._failures_of(attempt.step), 0)
        except PeerError:
            return  # a commit needs the store alone
        if failure is not None:
            raise PeerError(
                f"{attempt} will not be committed: {failure.decode()}",
                kind=ErrorKind.PEER_FAILED,
                hint="look at the log of the rank that is named; the next save is made as usual",
            )

    def _failures_of(self, step: int) -> str:
        return f"failed/{self._claim.generation}-{self._claim.nonce}/{step}"


def _still_in_flight(timeout_s: float) -> StoreError:
    return StoreError(
        f"the save before is still not over after {timeout_s:g} s",
        kind=ErrorKind.SAVE_FAILED,
        hint="the store is slower than the saves: save less often, or look at the store",
    )


def _not_committed(attempt: Attempt, missing: Sequence[int], timeout_s: float) -> PeerError:
    who = f"no receipt from rank {', '.join(map(str, missing))}" if missing else "no rank committed it"
    return PeerError(
        f"{attempt} is not committed after {timeout_s:g} s: {who}",
        kind=ErrorKind.PEER_TIMEOUT,
        hint="every rank must save the same step; look at the log of the rank that is named",
    )
