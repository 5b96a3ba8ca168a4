"""What the machine can do with some bytes: copy them in memory, write them to the disk."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from measuring import MIB, timed

_BLOCK = 16 * MIB


def copy_s(nbytes: int, *, block_nbytes: int = 64 * MIB) -> float:
    """Return the seconds that one thread takes to copy that much into memory that was touched before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        count = max(1, nbytes // block_nbytes)
        source = torch.ones(count, nbytes // count, dtype=torch.uint8)
        into = torch.zeros_like(source)
        return min(timed(lambda: into.copy_(source)) for _ in range(3))
    finally:
        torch.set_num_threads(threads)


class RawWrites:
    """Writes one buffer, page-aligned and touched, to new files in every way that may be the fastest."""

    def __init__(self, nbytes: int, folder: Path) -> None:
        self.nbytes = nbytes // mmap.PAGESIZE * mmap.PAGESIZE
        self._buffer = mmap.mmap(-1, self.nbytes)
        self._view = memoryview(self._buffer)
        for start in range(0, self.nbytes, MIB):
            self._view[start : start + MIB] = os.urandom(min(MIB, self.nbytes - start))
        self._folder = folder
        self.ways: dict[str, Callable[[Path], None]] = {
            "O_DIRECT": self._direct,
            "O_DIRECT, two at a time": self._direct_two,
            "buffered": self._buffered,
        }

    def time_s(self, way: str) -> float:
        """Return the seconds until the bytes are durable; the file is removed again."""
        path = self._folder / "raw"
        taken_s = timed(lambda: self.ways[way](path))
        if path.stat().st_size != self.nbytes:
            raise OSError(f"{path} has {path.stat().st_size} of {self.nbytes} bytes")
        path.unlink()
        return taken_s

    def close(self) -> None:
        self._view.release()
        self._buffer.close()

    def _direct(self, path: Path) -> None:
        self._write(path, os.O_DIRECT, threads=1)

    def _direct_two(self, path: Path) -> None:
        self._write(path, os.O_DIRECT, threads=2)

    def _buffered(self, path: Path) -> None:
        self._write(path, 0, threads=1)

    def _write(self, path: Path, flags: int, *, threads: int) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags)
        try:
            os.posix_fallocate(file, 0, self.nbytes)
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda start: self._write_block(file, start), range(0, self.nbytes, _BLOCK)))
            os.fsync(file)
        finally:
            os.close(file)

    def _write_block(self, file: int, start: int) -> None:
        end = min(start + _BLOCK, self.nbytes)
        while start < end:
            start += os.pwrite(file, self._view[start:end], start)
