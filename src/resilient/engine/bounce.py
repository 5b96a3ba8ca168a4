"""The memory that stored bytes pass through on their way into a target: a few buffers, used again and again."""

from __future__ import annotations

import mmap
from collections.abc import Collection
from contextlib import suppress
from typing import Final

import torch

_HUGE_PAGE_NBYTES: Final = 2 << 20


class Bounce:
    """Memory of one reader, which grows to what is asked of it.

    With accelerators among the targets it is pinned, and copies run behind what the caller's stream has queued by now,
    on streams of their own, while the reader reads on; `settle` before the memory is used again.
    """

    def __init__(self, accelerators: Collection[torch.device]) -> None:
        self._held: dict[str, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.Stream] = {}
        for device in accelerators:
            self._streams[device] = torch.Stream(device)
            self._streams[device].wait_stream(torch.accelerator.current_stream(device))

    def take(self, use: str, nbytes: int, at: int = 0) -> torch.Tensor:
        """Return so many bytes for one ``use``, with the same place within a page as ``at``; they hold anything.

        What lies within a page as it does within the file's can come from the disk without a copy, and an element that
        is aligned there is aligned here.
        """
        shift = at % mmap.PAGESIZE
        held = self._held.get(use)
        if held is None or held.numel() < shift + nbytes:
            room = nbytes + mmap.PAGESIZE
            held = self._held[use] = _pinned(room) if self._streams else _in_huge_pages(room)
        return held[shift : shift + nbytes]

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a part of this memory into a target, on any device and of any strides."""
        stream = self._streams.get(into.device)
        if stream is None:
            into.copy_(source)
            return
        with stream:
            into.copy_(source, non_blocking=True)

    def settle(self) -> None:
        """Wait until all that was copied from here has arrived."""
        for stream in self._streams.values():
            stream.synchronize()


def _pinned(nbytes: int) -> torch.Tensor:
    raw = torch.empty(nbytes + mmap.PAGESIZE, dtype=torch.uint8, pin_memory=True)
    return raw[-raw.data_ptr() % mmap.PAGESIZE :]


def _in_huge_pages(nbytes: int) -> torch.Tensor:
    """Return memory that starts with a page, and is made of huge ones if the system has some.

    A disk is told of each piece of memory that lies in one, and takes only so many (some 250) with a request: a huge
    page is one piece where 512 small ones are as many, unless they happen to be neighbors. Reads past the page cache
    took a quarter to half of the time for it.
    """
    whole = -(-nbytes // _HUGE_PAGE_NBYTES) * _HUGE_PAGE_NBYTES
    memory = mmap.mmap(-1, whole + _HUGE_PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    return raw[-raw.data_ptr() % _HUGE_PAGE_NBYTES :][:whole]
