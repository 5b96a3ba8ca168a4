"""The key-value store of torchelastic's agent in one round, which survives the death of any member, its host included.

torchelastic (2.13) uses it for two things: to hand out ranks right after the rendezvous, and for a barrier when its
workers have ended. An error in the first ends the agent, and the barrier waits 300 s for the dead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

from resilient.clock import Clock, Deadline

T = TypeVar("T")

ROLE_INFO: Final = "torchelastic/role_info/"
ASSIGNED_RANKS: Final = "torchelastic/assigned_ranks/"
EXIT_BARRIER: Final = "torchelastic/agent/terminal_state"

_POLL_S: Final = 0.02
_TIMEOUT_S: Final = 60.0


class AgentStore(dist.Store):
    """What torchelastic asks of a store, with answers of our own where a member is gone."""

    def __init__(
        self,
        store: dist.Store,
        *,
        broken: Callable[[], bool],
        finish: Callable[[], None],
        workers: Callable[[int], None],
        clock: Clock,
    ) -> None:
        """Wrap the store of one round.

        ``broken``: says whether the round is over, so that nobody needs to be waited for. ``finish``: waits until the
        other nodes have ended their work. ``workers``: is told how many workers this node has.
        """
        super().__init__()
        self._store = store
        self._broken = broken
        self._finish = finish
        self._workers = workers
        self._clock = clock
        self._timeout = timedelta(seconds=_TIMEOUT_S)
        self._local_workers = 1

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta, /) -> None:
        self._timeout = timeout

    def set(self, key: str, value: Any, /) -> None:
        if key.startswith(ROLE_INFO):
            self._note_workers(value)
        self._unless_gone(lambda: self._store.set(key, value), None)

    def multi_set(self, keys: Sequence[str], values: Any, /) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: str, /) -> bytes:
        found = self._await(key)
        return self._made_up(key) if found is None else found

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int, /) -> int:
        if key.startswith(EXIT_BARRIER):
            return 0  # the barrier is ours: nobody is the last one to come
        return self._unless_gone(lambda: self._store.add(key, amount), amount)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None, /) -> None:
        del timeout
        if any(key.startswith(EXIT_BARRIER) for key in keys):
            self._finish()
            return
        for key in keys:
            self._await(key)

    def check(self, keys: Sequence[str], /) -> bool:
        return self._unless_gone(lambda: self._store.check(list(keys)), False)

    def _await(self, key: str) -> bytes | None:
        """Return a value, or None if it will not come any more."""
        deadline = Deadline(self._clock, self._timeout.total_seconds())
        while not self._broken():
            if self._unless_gone(lambda: self._store.check([key]), False):
                return self._unless_gone(lambda: self._store.get(key), None)
            if deadline.expired:
                # As a store that timed out, where nobody is known to be gone.
                raise dist.DistStoreError(f"nobody has set {key!r} within {deadline.timeout_s:g} s")
            self._clock.sleep(_POLL_S)
        return None

    def _made_up(self, key: str) -> bytes:
        """Return something that lets the agent go on: it starts workers, and is told at once to start them anew.

        There is no rank 0 among them, so that what they wait for meanwhile does not come.
        """
        if key.startswith(ASSIGNED_RANKS):
            return json.dumps([1, 1 + self._local_workers, 1, 1 + self._local_workers]).encode()
        if key.startswith(ROLE_INFO):
            info = {"role": "default", "rank": int(key.removeprefix(ROLE_INFO)), "local_world_size": 1}
            return json.dumps(info).encode()
        raise dist.DistStoreError(f"{key!r} was not set by a node that is gone")

    def _unless_gone(self, call: Callable[[], T], otherwise: T) -> T:
        """Return what a call of the real store returns; if its host is gone, what goes for it then."""
        try:
            return call()
        except RuntimeError:
            # DistError and below: the host is gone, or about to be known to be.
            return otherwise

    def _note_workers(self, value: Any) -> None:
        with suppress(ValueError, KeyError, TypeError):
            self._local_workers = int(json.loads(value)["local_world_size"])
            self._workers(self._local_workers)
