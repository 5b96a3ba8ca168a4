"""What is noted beside an attempt: that it is pinned, failed, good, verified, or being read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Final

import msgspec

from resilient.catalog import process
from resilient.catalog.beat import Beating, is_alive, read_sign
from resilient.catalog.line import is_given_up
from resilient.catalog.once import create_once, exists, read_or_none
from resilient.catalog.tombstones import continued_by_any
from resilient.clock import SYSTEM_CLOCK, Clock, rfc3339
from resilient.errors import CorruptError, ErrorKind, NotFoundError, StoreError
from resilient.format.documents import Commit
from resilient.format.frame import seal_json, unseal_json
from resilient.format.layout import Attempt
from resilient.store.base import Store

PINNED: Final = "pinned"
"""Never deleted, until the mark is."""
FAILED: Final = "failed"
"""Whoever continues from it fails: restored only when asked for by its step."""
GOOD: Final = "good"
"""A person has looked and says that it may be continued from."""
VERIFIED: Final = "verified"
"""Every stored byte was compared with its digest."""
USER: Final = "user"
RUN: Final = "run"

READING: Final = "reading"

_INTERVAL_S: Final = 10.0
_DOCUMENT: Final = "mark"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One note: of which ``kind``, ``by`` whom (``user`` or ``run``), and why. ``created`` is for people."""

    kind: str
    by: str
    why: str
    host: str
    created: str


def write_mark(store: Store, attempt: Attempt, kind: str, *, by: str, why: str, clock: Clock) -> None:
    """Note something beside an attempt; one that is noted by the same already stays as it is.

    ``good`` takes ``failed`` away, whoever wrote it, and ``failed`` takes ``good`` away: the last word counts.
    """
    if kind == GOOD:
        for other in (USER, RUN):
            remove_mark(store, attempt, FAILED, other)
    key = attempt.mark(kind, by)
    mark = Mark(kind=kind, by=by, why=why, host=process.host(), created=rfc3339(clock.now()))
    data = _encode(mark, attempt)
    if not create_once(store, key, data) and _parse(read_or_none(store, key) or b"", key, attempt) is None:
        store.put(key, [data])  # what is there is damaged, and says nothing
    if kind == FAILED:
        # After it: killed between the two, both are there, and `is_failed` believes this one.
        remove_mark(store, attempt, GOOD, USER)


def mark_commit(store: Store, commit: Commit, kind: str, *, by: str, why: str, clock: Clock) -> None:
    """Note something beside a checkpoint that counts.

    Raises:
        NotFoundError: it is being deleted; a mark has come too late.
    """
    write_mark(store, commit.attempt, kind, by=by, why=why, clock=clock)
    # After the mark, as for readers: whoever deletes writes the tombstone first and looks at the marks then.
    if is_given_up(store, commit.attempt):
        remove_mark(store, commit.attempt, kind, by)
        raise _being_deleted(commit.attempt)


def read_mark(store: Store, attempt: Attempt, kind: str, by: str) -> Mark | None:
    """Return a mark, found by its exact name; None if there is none.

    One that does not parse counts as absent; but a damaged pin is a pin, so that nothing is deleted by accident.
    """
    key = attempt.mark(kind, by)
    data = read_or_none(store, key)
    if data is None:
        return None
    found = _parse(data, key, attempt)
    if found is None and kind == PINNED:
        return Mark(kind=kind, by=by, why="(the mark is damaged)", host="", created="")
    return found


def remove_mark(store: Store, attempt: Attempt, kind: str, by: str) -> bool:
    """Take a mark away; say whether there was one."""
    key = attempt.mark(kind, by)
    if not exists(store, key):
        return False
    store.delete(key)
    return True


def remove_marks(store: Store, attempt: Attempt, kind: str) -> int:
    """Take all marks of a kind away, whoever made them, and however; return how many there were."""
    listed = {key for key in store.list(attempt.marks) if key.startswith(attempt.mark(kind, ""))}
    found = listed | {key for by in (USER, RUN) if exists(store, key := attempt.mark(kind, by))}
    for key in found:
        store.delete(key)
    return len(found)


def list_marks(store: Store, attempt: Attempt) -> list[Mark]:
    """Return the marks of people and of the run, for people to read."""
    asked = [(kind, by) for kind in (PINNED, FAILED, GOOD, VERIFIED) for by in (USER, RUN)]
    return [found for kind, by in asked if (found := read_mark(store, attempt, kind, by)) is not None]


def is_failed(store: Store, attempt: Attempt) -> Mark | None:
    """Return the mark by which a checkpoint counts as failed, a person's before a run's; None if it does not.

    Whoever says ``good`` takes these marks away, so one that is there was written since.
    """
    return read_mark(store, attempt, FAILED, USER) or read_mark(store, attempt, FAILED, RUN)


def is_pinned(store: Store, attempt: Attempt) -> Mark | None:
    """Return the mark by which a checkpoint is never deleted; None if there is none."""
    return read_mark(store, attempt, PINNED, USER) or read_mark(store, attempt, PINNED, RUN)


def _being_deleted(attempt: Attempt) -> NotFoundError:
    return NotFoundError(f"{attempt} is being deleted", kind=ErrorKind.NO_SUCH_STEP)


def _encode(mark: Mark, attempt: Attempt) -> bytes:
    return seal_json(asdict(attempt) | asdict(mark) | {"kind": _DOCUMENT, "mark": mark.kind})


def _parse(data: bytes, key: str, attempt: Attempt) -> Mark | None:
    try:
        members = unseal_json(data, key)
        about = msgspec.convert({name: members.get(name) for name in Attempt.__slots__}, Attempt)
        found = msgspec.convert({**members, "kind": members.get("mark")}, Mark)
    except (CorruptError, msgspec.ValidationError):
        return None
    genuine = members.get("kind") == _DOCUMENT and about == attempt and attempt.mark(found.kind, found.by) == key
    return found if genuine else None


@contextmanager
def reading(store: Store, commit: Commit, clock: Clock = SYSTEM_CLOCK) -> Iterator[None]:
    """Keep a checkpoint from being deleted while it is read, if this process may write; else only the delay helps.

    Raises:
        NotFoundError: it is being deleted already.
    """
    attempt = commit.attempt
    beating = Beating(store, attempt.mark(READING, process.nonce()), interval_s=_INTERVAL_S, clock=clock, remove=True)
    try:
        beating.start()
    except StoreError as error:
        if error.retryable:
            raise
    try:
        # After the mark: whoever deletes writes the tombstone first and looks at the marks then, so one of us sees
        # the other.
        if is_given_up(store, attempt):
            raise _being_deleted(attempt)
        yield
    finally:
        beating.close()


def held_back(store: Store, attempt: Attempt, clock: Clock, *, newer: Iterable[int] = (), watch: bool) -> str | None:
    """Return why an attempt may not be deleted: it is pinned, being read, or continued; None if it may.

    ``newer`` are the generations after those that whoever deletes knows of: one that continues from this attempt, or
    is about to, needs it. What those before continue from, the line says.

    A reader on this machine that has died is found out at once. One on another machine counts as alive, unless
    ``watch`` is set: then its mark is watched for three of its intervals.
    """
    # Under their exact names: a listing may be stale. What else it shows is looked at, too.
    if is_pinned(store, attempt) is not None:
        return "pinned"
    continuing = continued_by_any(store, attempt, newer)
    if continuing is not None:
        return f"continued by generation {continuing}"
    for key in list(store.list(attempt.marks)):
        kind = key.removeprefix(attempt.marks).partition("-")[0]
        if kind == PINNED:
            return "pinned"
        if kind == READING and _is_read(store, key, clock, watch=watch):
            return "being read"
    return None


def remove_dead_readers(store: Store, attempt: Attempt, clock: Clock, *, watch: bool) -> int:
    """Remove the marks of readers that have died, as far as `held_back` can tell; return how many."""
    marks = [key for key in store.list(attempt.marks) if key.startswith(attempt.mark(READING, ""))]
    dead = [key for key in marks if not _is_read(store, key, clock, watch=watch)]
    for key in dead:
        store.delete(key)  # one that only stalled writes it again with its next sign
    return len(dead)


def _is_read(store: Store, key: str, clock: Clock, *, watch: bool) -> bool:
    if watch:
        return is_alive(store, key, clock, interval_s=_INTERVAL_S)
    sign = read_sign(store, key)
    return sign is None or process.lives(sign.host, sign.pid, sign.process_started) is not False
