"""How a process shows in a store that it lives, and how others see whether it still does."""

from __future__ import annotations

import os
import threading
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Final, Self

import msgspec

from resilient.catalog import process
from resilient.catalog.once import read_or_none
from resilient.clock import Clock, Deadline, rfc3339
from resilient.errors import CorruptError, ResilientError
from resilient.format.frame import seal_json, unseal_json
from resilient.store.base import Store
from resilient.store.retrying import Retrying

_PATIENCE: Final = 3.0
_LOOKS_PER_INTERVAL: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What a living process writes again and again; ``count`` moves each time, every ``interval_s``."""

    host: str
    pid: int
    process_started: str
    interval_s: float
    seen: str
    count: int = 0
    ended: bool = False


class Beating:
    """Writes a sign of life under a key until it is closed; then the sign says that it ended, or is removed.

    A beat that fails is skipped: the next one tells the same. The last error is in ``failure``. None is repeated for
    longer than until the next one is due, so that `close` does not wait for a store that is away.
    """

    def __init__(self, store: Store, key: str, *, interval_s: float, clock: Clock, remove: bool) -> None:
        self._store = store.within(interval_s) if isinstance(store, Retrying) else store
        self._key = key
        self._clock = clock
        self._remove = remove
        self._sign = Sign(
            host=process.host(),
            pid=os.getpid(),
            process_started=process.started(os.getpid()),
            interval_s=interval_s,
            seen=rfc3339(clock.now()),
        )
        self._stop = threading.Event()
        self._started = False
        self._thread: threading.Thread | None = None
        self.failure: ResilientError | None = None

    def start(self) -> None:
        """Write the first sign, then go on in a thread; a simulated process calls `beat` itself, if it wants to.

        Raises:
            StoreError: the first sign could not be written.
        """
        self._write(self._sign)
        self._started = True
        if process.played() is not None:
            return
        self._thread = threading.Thread(target=self._run, name=f"resilient-beat-{self._key}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and say so. Idempotent; raises nothing, since others find out in any case, only later."""
        if not self._started:
            return
        self._started = False
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        try:
            if self._remove:
                self._store.delete(self._key)
            else:
                self._write(replace(self._sign, ended=True))
        except ResilientError as error:
            self.failure = error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stop.wait(self._sign.interval_s):
            self.beat()

    def beat(self) -> None:
        """Write the next sign."""
        self._sign = replace(self._sign, count=self._sign.count + 1, seen=rfc3339(self._clock.now()))
        try:
            self._write(self._sign)
        except ResilientError as error:
            self.failure = error

    def _write(self, sign: Sign) -> None:
        self._store.put(self._key, [seal_json(asdict(sign))])


def read_sign(store: Store, key: str) -> Sign | None:
    """Return a sign of life; None if there is none, or it does not parse (it may be being written)."""
    data = read_or_none(store, key)
    if data is None:
        return None
    try:
        members = unseal_json(data, key)
        members.pop("format")
        return msgspec.convert(members, Sign)
    except (CorruptError, msgspec.ValidationError):
        return None


def is_alive(store: Store, key: str, clock: Clock, *, interval_s: float) -> bool:
    """Say whether the process that beats under ``key`` lives.

    On the same machine the process is looked up, which takes no time. Otherwise the sign is watched for three of its
    intervals (of ``interval_s`` where there is no sign yet): it lives if the sign moves. Clocks of different machines
    are never compared.
    """
    first = read_sign(store, key)
    if first is not None:
        if first.ended:
            return False
        seen = process.lives(first.host, first.pid, first.process_started)
        if seen is not None:
            return seen
        interval_s = first.interval_s
    deadline = Deadline(clock, _PATIENCE * interval_s)
    while not deadline.expired:
        clock.sleep(min(deadline.remaining_s, interval_s / _LOOKS_PER_INTERVAL))
        now = read_sign(store, key)
        if now is not None and now != first:
            return not now.ended
    return False
