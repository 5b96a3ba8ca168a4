"""Waiting until an attempt is a checkpoint: whoever sees all receipts first commits it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from resilient.catalog.commit import read_commit, try_commit
from resilient.clock import Clock, Deadline
from resilient.errors import ConflictError, ErrorKind, PeerError
from resilient.format.documents import Commit
from resilient.format.layout import Attempt
from resilient.policy.committing import last_turn_s, poll_s, takeover_s
from resilient.store.base import Store
from resilient.writer.messages import Open
from resilient.writer.proving import overtaken_by

_ORPHAN_S: Final = 60.0
"""How long a writer without a trainer waits for the receipts of others."""


class Committer:
    """Commits the attempts of one rank, or learns that another rank did."""

    def __init__(self, store: Store, opened: Open, *, clock: Clock) -> None:
        self._store = store
        self._opened = opened
        self._clock = clock
        self._abandoned: dict[int, str] = {}  # filled by another thread, by single operations
        self._orphaned = threading.Event()

    def abandon(self, step: int, why: str) -> None:
        """Stop waiting for a step, now or when it comes to that."""
        self._abandoned.setdefault(step, why)

    def leave(self) -> None:
        """Take note that the trainer is gone: nobody is left to tell, and a later life may be waiting."""
        self._orphaned.set()

    @property
    def orphaned(self) -> bool:
        return self._orphaned.is_set()

    def commit(self, attempt: Attempt, reason: str, metrics: Mapping[str, float]) -> Commit:
        """Commit as soon as all receipts are there, or learn that another rank did.

        No rank's death prevents it: rank 0 tries first, the others take over one after another. An orphan tries at the
        latest when it leaves, in a turn of its own: the receipt that came last may be its own.
        """
        deadline = Deadline(self._clock, self._opened.commit_timeout_s)
        rank, world_size = self._opened.rank, self._opened.world_size
        my_turn = Deadline(self._clock, takeover_s(rank=rank, world_size=world_size))
        alone: Deadline | None = None
        leaves = False
        for asked in itertools.count():
            if deadline.expired and self.orphaned and not leaves:
                leaves, deadline = True, Deadline(self._clock, last_turn_s(rank=rank, world_size=world_size))
            is_last = deadline.expired
            tries = my_turn.expired or (is_last and leaves)
            outcome = self._try(attempt, reason, metrics) if tries else read_commit(self._store, attempt)
            if isinstance(outcome, Commit):
                return outcome
            self._raise_if_abandoned(attempt)
            if is_last:
                raise _not_committed(attempt, outcome or (), (alone or deadline).timeout_s)
            if self.orphaned:
                self._raise_if_overtaken(attempt)
                alone = alone or Deadline(self._clock, min(deadline.remaining_s, _ORPHAN_S))
                deadline = deadline if leaves else alone
            self._clock.sleep(poll_s(asked, rank=rank, world_size=world_size))
        raise AssertionError("the deadline ends the loop")

    def forget(self, step: int) -> None:
        """Forget what was said of this step and those before."""
        for known in list(self._abandoned):
            if known <= step:
                self._abandoned.pop(known, None)

    def _try(self, attempt: Attempt, reason: str, metrics: Mapping[str, float]) -> Commit | tuple[int, ...]:
        return try_commit(
            self._store,
            attempt,
            world_size=self._opened.world_size,
            committer=self._opened.rank,
            reason=reason,
            metrics=metrics,
            clock=self._clock,
        )

    def _raise_if_abandoned(self, attempt: Attempt) -> None:
        why = self._abandoned.get(attempt.step)
        if why is not None:
            raise PeerError(
                f"{attempt} will not be committed: {why}",
                kind=ErrorKind.PEER_FAILED,
                hint="look at the log of the rank that is named; the next save is made as usual",
            )

    def _raise_if_overtaken(self, attempt: Attempt) -> None:
        newer = overtaken_by(self._store, attempt)
        if newer is not None:
            raise ConflictError(
                f"{attempt} is not committed, and generation {newer} has taken over",
                kind=ErrorKind.TAKEN_OVER,
            )


def _not_committed(attempt: Attempt, missing: Sequence[int], timeout_s: float) -> PeerError:
    who = f"no receipt from rank {', '.join(map(str, missing))}" if missing else "no rank committed it"
    return PeerError(
        f"{attempt} is not committed after {timeout_s:g} s: {who}",
        kind=ErrorKind.PEER_TIMEOUT,
        hint="every rank must save the same step; look at the log of the rank that is named",
    )
