"""A stop request as a file: for schedulers and scripts that can do no more than touch one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from resilient.detect.notice import Notice


class StopFile:
    """Somebody who makes this file wants the run to stop, and writes why into it, or nothing.

    It counts if it was made after this object: what an earlier stop has left must not stop the next start. With
    ``keep``: if it was made after the first one that was given the same; that is called with a name and a content, and
    returns the content that it was called with first. So also what was made between two lives of one start counts.
    """

    def __init__(self, path: Path, *, keep: Callable[[str, bytes], bytes] | None = None) -> None:
        self.name = f"the file {path}"
        self._path = path
        self._before = self._stamp()
        if keep is not None:
            name = f"stop-file-{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"
            with suppress(OSError):  # whoever kept it is gone: then this object counts
                kept = keep(name, msgspec.json.encode(self._before))
                self._before = msgspec.json.decode(kept, type=tuple[int, int] | None)

    def poll(self) -> Notice | None:
        stamp = self._stamp()
        if stamp is None:
            self._before = None  # made again later, it is a new request
            return None
        if stamp == self._before:
            return None
        lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        return Notice(why=f"{self.name} ({lines[0].strip()})" if lines and lines[0].strip() else self.name)

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns
