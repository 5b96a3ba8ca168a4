"""Where the ranks of a node lay their pages, for all watchers of the node: in one folder for each generation."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from resilient.detect import proc
from resilient.detect.page import PageView
from resilient.detect.words import PAGE

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 -- a directory of our own in it, that nobody else may use
_LIFE: Final = "life-"
_LEFT_S: Final = 3600.0
_ABANDONED_S: Final = 7 * 24 * 3600.0


def base() -> Path:
    """Return a directory in memory that only this user may use; raises OSError if there is none.

    In memory, because a page of a file on a disk is written back now and then, and whoever writes to it waits.
    """
    shared = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    # Containers may share /dev/shm and the user's number (--ipc=host), and not know each other's processes.
    processes = Path("/proc/self/ns/pid").stat().st_ino
    folder = shared / f"resilient-watch-{os.getuid()}-{processes}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a directory that only this user may use")
    return folder


def of_generation(generation: int, nonce: str) -> Path:
    """Return the folder of a generation on this node; raises OSError."""
    folder = base() / f"{_LIFE}{generation:08d}-{nonce}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def learned(run: str, rank: int) -> Path:
    """Return the file in which a rank of a run keeps how long its sections take, for its next lives on this node."""
    return base() / f"learned-{run}-{rank:06d}"


def sweep(now_s: float) -> None:
    """Remove what dead lives have left an hour ago, and what was learned of a run that was not continued for a week.

    ``now_s``: the wall clock, as file systems have it.
    """
    for path in list(base().iterdir()):
        with suppress(OSError):  # others sweep as well
            age_s = now_s - path.stat().st_mtime
            if path.is_dir() and age_s > _LEFT_S and not _lives(path):
                shutil.rmtree(path)
            elif path.is_file() and age_s > _ABANDONED_S:
                path.unlink()


def _lives(folder: Path) -> bool:
    for path in folder.glob(f"{PAGE}*"):
        with suppress(OSError, ValueError):
            view = PageView(path)
            pid = view.owner.pid
            view.close()
            if proc.state(pid) not in ("", "Z", "X"):
                return True
    return False
