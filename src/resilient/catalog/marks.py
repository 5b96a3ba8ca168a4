"""What is noted beside an attempt: that it is pinned, or being read."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from resilient.catalog.beat import Beating, is_alive, read_sign
from resilient.catalog.once import exists
from resilient.catalog.process import lives
from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.errors import ErrorKind, NotFoundError, StoreError
from resilient.format.documents import Commit
from resilient.format.layout import Attempt
from resilient.store.base import Store

_INTERVAL_S: Final = 10.0
_PINNED: Final = "pinned"
_READING: Final = "reading"


@contextmanager
def reading(store: Store, commit: Commit, clock: Clock = SYSTEM_CLOCK) -> Iterator[None]:
    """Keep a checkpoint from being deleted while it is read, if this process may write; else only the delay helps.

    Raises:
        NotFoundError: it is being deleted already.
    """
    attempt = commit.attempt
    beating = Beating(
        store, attempt.mark(_READING, secrets.token_hex(8)), interval_s=_INTERVAL_S, clock=clock, remove=True
    )
    try:
        beating.start()
    except StoreError as error:
        if error.retryable:
            raise
    try:
        # After the mark: whoever deletes writes the tombstone first and looks at the marks then, so one of us sees
        # the other.
        if exists(store, attempt.tombstone):
            raise NotFoundError(f"{attempt} is being deleted", kind=ErrorKind.NO_SUCH_STEP)
        yield
    finally:
        beating.close()


def held_back(store: Store, attempt: Attempt, clock: Clock, *, watch: bool) -> str | None:
    """Return why an attempt may not be deleted: it is pinned or being read; None if it may.

    A reader on this machine that has died is found out at once. One on another machine counts as alive, unless
    ``watch`` is set: then its mark is watched for three of its intervals.
    """
    for key in list(store.list(attempt.marks)):
        kind = key.removeprefix(attempt.marks).partition("-")[0]
        if kind == _PINNED:
            return "pinned"
        if kind == _READING and _is_read(store, key, clock, watch=watch):
            return "being read"
    return None


def _is_read(store: Store, key: str, clock: Clock, *, watch: bool) -> bool:
    if watch:
        return is_alive(store, key, clock, interval_s=_INTERVAL_S)
    sign = read_sign(store, key)
    return sign is None or lives(sign.host, sign.pid, sign.process_started) is not False
