"""Which error of ours an error of the operating system is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from resilient.errors import ErrorKind, StoreError

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_PASSING = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.EINTR,
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOLCK,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)


def store_error(error: OSError, *, doing: str, path: Path, nbytes: int = 0) -> StoreError:
    """Return what to raise for ``error``. ``doing`` names verb and key, ``nbytes`` is what was to be written."""
    cause = os.strerror(error.errno) if error.errno else str(error)
    message = f"{doing} failed at {path}: {cause}"
    if error.errno in _NO_SPACE:
        return StoreError(
            f"{message} ({nbytes:,} bytes needed, {_free(path)} free)",
            kind=ErrorKind.NO_SPACE,
            hint="free space or quota there, keep fewer checkpoints, or choose another place",
        )
    if error.errno in _DENIED:
        return StoreError(
            message,
            kind=ErrorKind.ACCESS_DENIED,
            hint="check owner and mode of the directory, and whether it is mounted read-only",
        )
    if error.errno == errno.ENOTDIR:
        return StoreError(
            message, kind=ErrorKind.IO, hint="a file is where a directory should be: choose another place"
        )
    return StoreError(message, kind=ErrorKind.IO, retryable=error.errno in _PASSING)


def _free(path: Path) -> str:
    """Return how many bytes a user may still write where ``path`` is or would be."""
    for folder in (path, *path.parents):
        try:
            state = os.statvfs(folder)
        except OSError:
            continue  # not made yet: its parent is on the same file system
        return f"{state.f_bavail * state.f_frsize:,}"
    return "an unknown number"
