"""How a large file gets from memory to the disk: past the page cache, in large blocks.

Through the cache every byte is copied once more, into pages that have to be found first: a tenth to a half of the speed
here, at ten to a hundred times the processor time, and at the cost of what others have in the cache, the training data
above all.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Final

import numpy as np

LEAST_NBYTES: Final = 1 << 20
"""Less is written in one go through the cache, in the time that the preparations would take."""

_BLOCK_NBYTES: Final = 64 << 20
_GATHERED_NBYTES: Final = 8 << 20
_PAGE: Final = mmap.PAGESIZE
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_libc: Final = ctypes.CDLL(None, use_errno=True)


def write_directly(file: int, views: Sequence[memoryview]) -> bool:
    """Write all buffers, back to back, to a new file; say whether that was possible.

    If it was not, for this file system or for this memory, the file is empty again and open as it was.
    """
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        _reserve(file, sum(view.nbytes for view in views))
        _Stream(file).write_all(views)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        os.ftruncate(file, 0)
        return False
    return True


def _reserve(file: int, nbytes: int) -> None:
    """Find room for a file at once: it lies in few pieces, and a full disk shows before the first byte is written.

    Not ``posix_fallocate``: where the file system cannot do that, it writes zeros.
    """
    if _libc.fallocate(file, 0, ctypes.c_long(0), ctypes.c_long(nbytes)) != 0:
        number = ctypes.get_errno()
        if number in _NO_ROOM:
            raise OSError(number, os.strerror(number))


class _Stream:
    """Writes to a file in whole pages; only the last one is filled up, and cut off again."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._written = 0
        self._bounce = memoryview(bytearray())
        self._gathered = 0

    def write_all(self, views: Sequence[memoryview]) -> None:
        nbytes = left = sum(view.nbytes for view in views)
        for view in views:
            # Straight from the caller's memory, if its pages are the file's pages.
            straight = view.nbytes // _PAGE * _PAGE if not self._gathered and _address(view) % _PAGE == 0 else 0
            self._write(view[:straight])
            left -= straight
            self._gather(view[straight:], left)
            left -= view.nbytes - straight
        padded = -(-self._gathered // _PAGE) * _PAGE
        self._bounce[self._gathered : padded] = bytes(padded - self._gathered)
        self._write(self._bounce[:padded])
        os.ftruncate(self._file, nbytes)

    def _gather(self, view: memoryview, left: int) -> None:
        """Copy what does not lie in pages of its own next to what came before; ``left`` bytes are still to come."""
        if view and not self._bounce:
            self._bounce = memoryview(mmap.mmap(-1, min(_GATHERED_NBYTES, -(-left // _PAGE) * _PAGE)))
        while view:
            taken = view[: len(self._bounce) - self._gathered]
            self._bounce[self._gathered : self._gathered + taken.nbytes] = taken
            self._gathered += taken.nbytes
            view = view[taken.nbytes :]
            if self._gathered == len(self._bounce):
                self._write(self._bounce)
                self._gathered = 0

    def _write(self, view: memoryview) -> None:
        while view:
            count = os.pwrite(self._file, view[:_BLOCK_NBYTES], self._written)
            self._written += count
            view = view[count:]


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data) if view else 0
