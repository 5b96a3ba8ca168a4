"""The directory that an agent shares with its workers; those of agents that were killed are taken away by the next."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from resilient.catalog.process import host, lives, started

_PREFIX: Final = "resilient-node-"
_OWNER: Final = "agent"


class _Owner(msgspec.Struct, frozen=True, array_like=True):
    host: str
    pid: int
    started: str


def make_directory() -> Path:
    """Return a new directory of this process."""
    made = Path(tempfile.mkdtemp(prefix=_PREFIX))
    owner = _Owner(host=host(), pid=os.getpid(), started=started(os.getpid()))
    (made / _OWNER).write_bytes(msgspec.json.encode(owner))
    return made


def collect() -> list[Path]:
    """Remove the directories of this user whose process is known to be dead; return those."""
    removed = []
    for found in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            if found.lstat().st_uid != os.getuid():
                continue
            owner = msgspec.json.decode((found / _OWNER).read_bytes(), type=_Owner)
        except (OSError, msgspec.MsgspecError):
            continue  # just being made, or removed
        if lives(owner.host, owner.pid, owner.started) is False:
            shutil.rmtree(found, ignore_errors=True)
            removed.append(found)
    return removed
