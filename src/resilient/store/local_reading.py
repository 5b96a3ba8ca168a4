"""How a file's bytes get into memory: from the page cache what is there, from the disk past it what is not.

A cold read through the page cache first finds room in it, page by page, and then copies: 0.4 to 1.2 GiB/s where
``O_DIRECT`` gave 1.3 to 1.6, at a fifth of the CPU time. It also pushes out what others have there, the training data
above all. Into memory of huge pages ``O_DIRECT`` is at its best (1.4 to 2.9): into small ones that lie scattered, the
disk gets it in so many requests that it is hardly faster than the cache (0.2 to 0.9).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from typing import Final

REQUEST_NBYTES: Final = 4 << 20
"""What each of a few parallel reads, in the order of the file, should ask for: enough to keep a disk busy, and little
enough to be still in the processor's cache when somebody looks at it."""

UNIT_NBYTES: Final = mmap.PAGESIZE
_LEAST_NBYTES: Final = 1 << 20  # for less, the kernel's own read-ahead is as good
_BYTES_PER_CALL: Final = 1 << 30  # Linux moves at most 2 GiB - 4 KiB a call


def read(file: int, start: int, into: memoryview) -> int:
    """Fill ``into`` with the bytes of a file from ``start`` on, as far as it goes; return their number.

    What is not in the page cache comes past it if both the place in the file and the memory are multiples of
    `UNIT_NBYTES`. The open file must be the caller's alone: its flags change meanwhile.
    """
    units = into[: into.nbytes // UNIT_NBYTES * UNIT_NBYTES]
    done = 0
    if units.nbytes >= _LEAST_NBYTES and start % UNIT_NBYTES == 0 and _address(into) % UNIT_NBYTES == 0:
        middle = (start + units.nbytes // 2) // UNIT_NBYTES * UNIT_NBYTES
        if not _is_cached(file, middle):
            done = _read_past(file, start, units)
            # Else the page that was asked about would stay, and make all of this look cached next time.
            os.posix_fadvise(file, middle, UNIT_NBYTES, os.POSIX_FADV_DONTNEED)
    return done + _read_through(file, start + done, into[done:])


def _is_cached(file: int, at: int) -> bool:
    """Say whether the page at ``at`` is in the page cache, or that cannot be told; if it is not, it will be."""
    try:
        os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # not every file system knows the flag
        return True
    return True


def _read_past(file: int, start: int, into: memoryview) -> int:
    """Read whole units from the disk; return how many bytes came, 0 where the file system has no way past the cache."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        done = os.preadv(file, [into[:_BYTES_PER_CALL]], start)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: no O_DIRECT here, or only in larger units
            raise
        done = 0
    finally:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
    return done


def _read_through(file: int, start: int, into: memoryview) -> int:
    done = 0
    while done < into.nbytes:
        count = os.preadv(file, [into[done : done + _BYTES_PER_CALL]], start + done)
        if count == 0:
            break
        done += count
    return done


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
