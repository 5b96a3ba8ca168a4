"""Calling a store again when it failed in a way that may pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import TypeVar

import tenacity

from resilient.clock import SYSTEM_CLOCK, Clock, Deadline
from resilient.errors import StoreError
from resilient.format.digest import BytesLike
from resilient.store.base import Capabilities, Store, Sweepable
from resilient.store.recipe import Recipe
from resilient.store.throttled import Bandwidth, throttled

T = TypeVar("T")

TIMEOUT_S = 120.0
"""How long a call goes on trying. A store that is away for longer is a failed save, which training survives."""

_FIRST_WAIT_S = 0.2  # at most; it doubles with each try
_LONGEST_WAIT_S = 10.0


def retry(call: Callable[[], T], *, doing: str, clock: Clock, timeout_s: float) -> T:
    """Return what ``call`` returns, calling it again after each retryable `StoreError` until ``timeout_s`` are over.

    Waits are drawn between nothing and a limit that doubles, so that the ranks of a large run do not come back all at
    once. The error raised in the end has the kind of the last one, has it as its cause, and says what was tried how
    often.
    """
    deadline = Deadline(clock, timeout_s)
    try:
        return call()  # mostly that is all, and setting up for more costs as much as a small read
    except StoreError as error:
        if not error.retryable:
            raise
        failed = [error]

    def again() -> T:
        if failed:
            raise failed.pop()  # that was the first try: it counts, and is waited after
        return call()

    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, StoreError) and error.retryable),
        wait=tenacity.wait_random_exponential(multiplier=_FIRST_WAIT_S, max=_LONGEST_WAIT_S),
        stop=lambda state: state.upcoming_sleep >= deadline.remaining_s,
        sleep=clock.sleep,
        reraise=True,
    )
    try:
        return attempts(again)
    except StoreError as error:
        count = int(attempts.statistics["attempt_number"])
        if not error.retryable:
            raise
        raise StoreError(
            f"{doing} failed {count} times within {timeout_s:g} s, the last time with: {error}",
            kind=error.kind,
            hint=error.hint,
            retryable=True,
        ) from error


class Retrying:
    """A store whose calls go on trying, each for at most ``timeout_s`` (plus what the last try takes).

    ``recipe`` says how another process opens the same place; None if none can.
    """

    def __init__(
        self, inner: Store, *, clock: Clock = SYSTEM_CLOCK, timeout_s: float = TIMEOUT_S, recipe: Recipe | None = None
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._timeout_s = timeout_s
        self.recipe = recipe

    def within(self, timeout_s: float) -> Retrying:
        """Return the same store with another deadline per call."""
        return Retrying(self._inner, clock=self._clock, timeout_s=timeout_s, recipe=self.recipe)

    def throttled(self, bandwidth: Bandwidth) -> Retrying:
        """Return the same store with bounded uploads; what is sent again counts again."""
        inner = throttled(self._inner, bandwidth)
        return Retrying(inner, clock=self._clock, timeout_s=self._timeout_s, recipe=self.recipe)

    @property
    def inner(self) -> Store:
        return self._inner

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        self._retry("put", key, lambda: self._inner.put(key, parts))

    def create(self, key: str, data: bytes) -> bool:
        return self._retry("create", key, lambda: self._inner.create(key, data))

    def get(self, key: str) -> bytes:
        return self._retry("get", key, lambda: self._inner.get(key))

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        self._retry("read", key, lambda: self._inner.read_into(key, start, into))

    def size(self, key: str) -> int:
        return self._retry("size", key, lambda: self._inner.size(key))

    def list(self, prefix: str) -> Iterator[str]:
        # Whole: a listing that fails half-way and starts again would give keys twice.
        return iter(self._retry("list", prefix, lambda: tuple(self._inner.list(prefix))))

    def folders(self, prefix: str) -> Iterator[str]:
        return iter(self._retry("list", prefix, lambda: tuple(self._inner.folders(prefix))))

    def delete(self, key: str) -> None:
        self._retry("delete", key, lambda: self._inner.delete(key))

    def sweep(self, before: datetime) -> int:
        return self._inner.sweep(before) if isinstance(self._inner, Sweepable) else 0

    def close(self) -> None:
        self._inner.close()

    def _retry(self, verb: str, key: str, call: Callable[[], T]) -> T:
        return retry(call, doing=f"{verb} of {key!r} in {self.url}", clock=self._clock, timeout_s=self._timeout_s)
