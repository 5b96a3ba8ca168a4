"""Which states all ranks have in their tiers: only then may an older one go."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

import msgspec

from resilient.clock import Clock, Deadline
from resilient.engine.peers import Peers
from resilient.errors import PeerError
from resilient.format.documents import Claim

_REMEMBERED: Final = 8
_POLL_S: Final = 0.005
_LONGEST_POLL_S: Final = 0.5
_PATIENCE_S: Final = 60.0


class Complete:
    """Every rank says which steps it has; rank 0 looks, on a thread of its own, which ones all have, and tells.

    Nobody waits: what a rank does not know yet stays a little longer. A step that some rank does not have after a while
    is settled without being complete: it never becomes so later, for then a rank may have let it go.
    """

    def __init__(self, claim: Claim, peers: Peers, *, what: str, clock: Clock) -> None:
        self._peers = peers
        self._topic = f"{what}/{claim.generation}-{claim.nonce}"
        self._clock = clock
        self.told: Callable[[int], object] = lambda _: None
        """Called on rank 0 with each step that is found to be complete."""
        self._mine: tuple[int, ...] = ()  # replaced as a whole: two threads look at it; see `_missing`
        self._theirs: defaultdict[int, set[int]] = defaultdict(set)
        self._newest: int | None = None
        self._settled = -1  # no step up to this one becomes complete any more
        self._telling = threading.Lock()
        self._steps: SimpleQueue[int | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if peers.rank == 0:
            self._thread = threading.Thread(target=self._look, name=f"resilient-{what}", daemon=True)
            self._thread.start()

    def settled(self, step: int) -> bool:
        """Say whether it is decided if a step is complete, as far as this rank knows."""
        return step <= self._settled

    def newest(self) -> int | None:
        """Return the newest step that is known to be complete; asks the key-value store, but does not wait."""
        if self._peers.rank != 0:
            try:
                found = self._peers.fetch(f"{self._topic}/all", 0)
            except PeerError:
                return self._newest  # rank 0 is gone, and with it the job
            if found is not None:
                self._newest, self._settled = msgspec.msgpack.decode(found, type=tuple[int | None, int])
        return self._newest

    def failed(self, step: int) -> None:
        """Say that this rank will not have a step; any thread."""
        if self._peers.rank == 0:
            self._settle(step, complete=False)
        else:
            self._say(_missing(step))

    def written(self, step: int) -> None:
        """Say that this rank has a step."""
        self._say(step)
        self._steps.put(step)

    def close(self) -> None:
        """Stop looking. Idempotent."""
        self._steps.put(None)

    def _say(self, word: int) -> None:
        with self._telling:
            self._mine = (*self._mine, word)[-_REMEMBERED:]
            if self._peers.world_size > 1:
                with suppress(PeerError):  # nobody can be told any more
                    self._peers.publish(f"{self._topic}/{self._peers.rank}", msgspec.msgpack.encode(self._mine))

    def _look(self) -> None:
        step: int | None = self._steps.get()
        while step is not None:
            step = self._steps.get() if self._is_complete(step) else self._next(step)

    def _next(self, step: int) -> int | None:
        """Return the step to look for after one that is not complete yet: the same, unless there is a newer one."""
        deadline, poll_s = Deadline(self._clock, _PATIENCE_S), _POLL_S
        while not deadline.expired:
            try:
                return self._steps.get(timeout=poll_s)
            except Empty:
                if self._is_complete(step):
                    return self._steps.get()
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)
        self._settle(step, complete=False)
        return self._steps.get()

    def _settle(self, step: int, *, complete: bool) -> None:
        """Decide about all steps up to this one, unless that is done, and tell; on rank 0."""
        with self._telling:
            if step <= self._settled:
                return
            newest = step if complete else self._newest
            if self._peers.world_size > 1:
                with suppress(PeerError):  # the job is over
                    self._peers.publish(f"{self._topic}/all", msgspec.msgpack.encode((newest, step)))
            # After that: what is ordered of all ranks because of it must find them knowing it.
            self._newest, self._settled = newest, step
        if complete:
            self.told(step)

    def _is_complete(self, step: int) -> bool:
        """Find the newest step that all ranks have; say whether this one need not be looked for any more."""
        common = set(self._mine)
        try:
            for rank in range(1, self._peers.world_size):
                if step not in self._theirs[rank]:  # those that have it need not be asked again
                    found = self._peers.fetch(f"{self._topic}/{rank}", 0)
                    self._theirs[rank] = set() if found is None else set(msgspec.msgpack.decode(found, type=list[int]))
                common &= self._theirs[rank]
                if _missing(step) in self._theirs[rank]:
                    self._settle(step, complete=False)
            newest = max(common, default=None)
            if newest is not None:
                self._settle(newest, complete=True)
        except PeerError:
            return True  # the job is over; the next state, if there is one, is looked for again
        return step <= self._settled


def _missing(step: int) -> int:
    """Return how a rank says that it will not have a step."""
    return -1 - step
