"""Writing a file that must not be there yet, whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final

from resilient.errors import ConflictError, ErrorKind, ResilientError, UsageError
from resilient.store.os_faults import store_error

_BAD_NAME: Final = frozenset({errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP})
"""Errors of a name, not of the place that it names."""


def refuse(path: Path, *, overwrite: bool, example: str) -> None:
    """See that the file may be made, before any long work. ``example``: how to name one, as in ``--svg plan.svg``.

    Raises:
        ConflictError: something is there that must not be replaced.
        UsageError: no file can be there.
    """
    folder = path.parent
    try:
        if not folder.is_dir():
            raise UsageError(
                f"{folder} is no directory" if folder.exists() else f"there is no directory {folder}",
                kind=ErrorKind.INVALID_ARGUMENT,
                hint=f"make it first, or name a file in a directory that is there, as in {example}",
            )
        is_there, is_folder = _is_there(path), path.is_dir()
    except OSError as error:
        raise _unwritable(path, error, example) from error
    if is_folder:
        raise ConflictError(
            f"{path} is a directory", kind=ErrorKind.DESTINATION_NOT_EMPTY, hint=f"name a file, as in {example}"
        )
    if is_there and not overwrite:
        raise ConflictError(
            f"{path} is there already",
            kind=ErrorKind.DESTINATION_NOT_EMPTY,
            hint="name another file, or add --overwrite",
        )


def write(path: Path, text: str, *, overwrite: bool, example: str) -> None:
    """Write the file; one that has come into being meanwhile stays unless it may be replaced."""
    # Without the name of the file, which may be as long as names can be.
    partial = path.with_name(f".resilient.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        if overwrite:
            partial.replace(path)
        else:
            _put(partial, path)
    except FileExistsError:
        refuse(path, overwrite=False, example=example)
        raise
    except OSError as error:
        raise _unwritable(path, error, example) from error
    finally:
        with suppress(OSError):  # what went wrong above is what there is to say
            partial.unlink(missing_ok=True)


def _is_there(path: Path) -> bool:
    try:
        path.lstat()  # also a link to nowhere is something, and in the way
    except FileNotFoundError:
        return False
    return True


def _unwritable(path: Path, error: OSError, example: str) -> ResilientError:
    if error.errno in _BAD_NAME:
        return UsageError(
            f"{path} cannot be written: {os.strerror(error.errno)}",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint=f"name another file, as in {example}",
        )
    return store_error(error, doing="writing", path=path)


def _put(partial: Path, path: Path) -> None:
    """Give a file its name; unlike a renaming, that fails if there is one of that name."""
    try:
        path.hardlink_to(partial)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links, as of a USB stick or of a mounted bucket
        path.open("x").close()
        try:
            partial.replace(path)
        except BaseException:
            path.unlink(missing_ok=True)  # nothing but the empty file from above
            raise
