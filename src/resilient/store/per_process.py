"""One fsspec filesystem per process, made again after a fork."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


class PerProcess:
    """Gives each process a filesystem of its own.

    Connections and the thread of the event loop do not survive a fork: a child that used its parent's would wait for
    ever.
    """

    def __init__(self, filesystem: AbstractFileSystem) -> None:
        self._of_parents: list[AbstractFileSystem] = []  # kept: their finalizers would wait for a loop that is gone
        self._mine = (os.getpid(), filesystem)

    def get(self) -> AbstractFileSystem:
        # No lock: a child could inherit it held. Two threads that both make one waste one.
        pid, filesystem = self._mine
        if pid != os.getpid():
            self._of_parents.append(filesystem)
            filesystem = fresh(filesystem)
            self._mine = (os.getpid(), filesystem)
        return filesystem


def fresh(filesystem: AbstractFileSystem) -> AbstractFileSystem:
    """Return another instance with the same arguments."""
    options = {**filesystem.storage_options, "skip_instance_cache": True}
    made: AbstractFileSystem = type(filesystem)(*filesystem.storage_args, **options)
    return made
