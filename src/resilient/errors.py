"""The exceptions that this package raises on purpose, and what a handler does with each.

::

    ResilientError            exit 1    anything below
    ├── UsageError            exit 2    fix the call or the configuration   (also a ValueError)
    ├── NotFoundError         exit 10   start fresh, or look elsewhere      (also a LookupError)
    ├── ConflictError         exit 11   another writer won; re-read
    ├── CorruptError          exit 12   fall back to an older step
    ├── StoreError            exit 13   retry, then fail over               (also an OSError)
    └── PeerError             exit 14   restart the group
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar


class ErrorKind(StrEnum):
    """What exactly went wrong: append-only, stable across releases, printed by the CLI's ``--json``."""

    INVALID_ARGUMENT = "invalid-argument"
    INVALID_SETTING = "invalid-setting"
    UNKNOWN_SCHEME = "unknown-scheme"
    MISSING_EXTRA = "missing-extra"
    UNSAVEABLE = "unsaveable"
    NOT_A_BOUNDARY = "not-a-boundary"
    NAME_COLLISION = "name-collision"
    UNOWNED_PARAMETER = "unowned-parameter"
    MISMATCH = "mismatch"
    DESTINATION_NOT_EMPTY = "destination-not-empty"
    NO_CHECKPOINT = "no-checkpoint"
    NO_SUCH_STEP = "no-such-step"
    NO_SUCH_ITEM = "no-such-item"
    NO_SUCH_OBJECT = "no-such-object"
    NO_SUCH_BUCKET = "no-such-bucket"
    NOT_A_RUN = "not-a-run"
    RUN_IN_USE = "run-in-use"
    TAKEN_OVER = "taken-over"
    ALREADY_SAVED = "already-saved"
    DIVERGENT = "divergent"
    INCOMPLETE = "incomplete"
    BAD_DIGEST = "bad-digest"
    MALFORMED = "malformed"
    NEWER_FORMAT = "newer-format"
    NOTHING_USABLE = "nothing-usable"
    ACCESS_DENIED = "access-denied"
    BAD_CREDENTIALS = "bad-credentials"
    UNREACHABLE = "unreachable"
    NO_SPACE = "no-space"
    THROTTLED = "throttled"
    IO = "io"
    DEADLINE = "deadline"
    UNTRUSTWORTHY_STORE = "untrustworthy-store"
    PEER_TIMEOUT = "peer-timeout"
    PEER_FAILED = "peer-failed"
    SAVE_FAILED = "save-failed"
    CRASH_LOOP = "crash-loop"
    UNFIT_NODE = "unfit-node"


class ResilientError(Exception):
    """Base of everything that this package raises on purpose.

    ``kind`` says what went wrong, ``hint`` what to do now, ``rank`` where, if that is known.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, kind: ErrorKind, hint: str | None = None, rank: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.hint = hint
        self.rank = rank
        # PEP 678: tracebacks show notes, and the kind is what the documents are ordered by.
        self.add_note(f"kind: {kind}")
        if hint is not None:
            self.add_note(f"hint: {hint}")

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross processes; the default would lose the keyword-only arguments.
        return _rebuild, (type(self), str(self.args[0]), self._keywords())

    def _keywords(self) -> dict[str, Any]:
        return {"kind": self.kind, "hint": self.hint, "rank": self.rank}


class UsageError(ResilientError, ValueError):
    """The call or the configuration is wrong."""

    exit_code = 2


class NotFoundError(ResilientError, LookupError):
    """Nothing is there."""

    exit_code = 10


class ConflictError(ResilientError):
    """Another writer won, or the parts contradict each other."""

    exit_code = 11


class CorruptError(ResilientError):
    """Stored bytes are not what was written."""

    exit_code = 12


class StoreError(ResilientError, OSError):
    """A store refused or failed; ``retryable`` says whether the same call may succeed later."""

    exit_code = 13

    def __init__(
        self,
        message: str,
        *,
        kind: ErrorKind,
        hint: str | None = None,
        rank: int | None = None,
        retryable: bool = False,
    ) -> None:
        super().__init__(message, kind=kind, hint=hint, rank=rank)
        self.retryable = retryable

    def __str__(self) -> str:
        return str(self.args[0])

    def _keywords(self) -> dict[str, Any]:
        return {**super()._keywords(), "retryable": self.retryable}


class PeerError(ResilientError):
    """Another rank failed, or did not answer in time."""

    exit_code = 14


def _rebuild(cls: type[ResilientError], message: str, keywords: dict[str, Any]) -> ResilientError:
    return cls(message, **keywords)


__all__ = [
    "ConflictError",
    "CorruptError",
    "ErrorKind",
    "NotFoundError",
    "PeerError",
    "ResilientError",
    "StoreError",
    "UsageError",
]
