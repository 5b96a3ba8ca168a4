"""What the machine can do with some files: read all of their bytes, in every way that may be the fastest."""

from __future__ import annotations

import mmap
import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from measuring import MIB


class RawReads:
    """Reads one rank's share of some files into a few buffers, touched before; no destination costs less.

    The buffers are of huge pages, if the system has some: a disk takes those in larger requests.
    """

    def __init__(self, paths: Sequence[Path], rank: int, ranks: int) -> None:
        self._paths = paths
        self._rank = rank
        self._ranks = ranks
        self._buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(4):
            memory = mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            buffer = memoryview(memory)
            buffer[:] = bytes(len(buffer))
            self._buffers.put(buffer)
        self.ways: dict[str, Callable[[], None]] = {
            "O_DIRECT, 4 x 4 MiB": lambda: self._read(os.O_DIRECT, 4, 4 * MIB),
            "O_DIRECT, 2 x 16 MiB": lambda: self._read(os.O_DIRECT, 2, 16 * MIB),
            "buffered, 2 x 4 MiB": lambda: self._read(0, 2, 4 * MIB),
        }

    def _read(self, flags: int, threads: int, block: int) -> None:
        jobs = []
        files = [os.open(path, os.O_RDONLY | flags) for path in self._paths]
        for file in files:
            blocks = range(0, os.fstat(file).st_size, block)
            share = range(len(blocks) * self._rank // self._ranks, len(blocks) * (self._rank + 1) // self._ranks)
            jobs += [(file, blocks[number], block) for number in share]
        try:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda job: self._read_block(*job), jobs))
        finally:
            for file in files:
                os.close(file)

    def _read_block(self, file: int, start: int, nbytes: int) -> None:
        buffer = self._buffers.get()
        try:
            os.preadv(file, [buffer[:nbytes]], start)
        finally:
            self._buffers.put(buffer)


def files_of(place: Path) -> list[Path]:
    """Return the files at and below a place."""
    return sorted(path for path in [place, *place.rglob("*")] if path.is_file())


def make_cold(paths: Sequence[Path]) -> None:
    """Drop files from the page cache."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def make_warm(paths: Sequence[Path]) -> None:
    """Bring files into the page cache."""
    block = bytearray(4 * MIB)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
