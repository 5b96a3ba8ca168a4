"""The memory that stored bytes pass through on their way into a target: a few buffers, used again and again."""

from __future__ import annotations

import mmap
from collections.abc import Collection

import torch


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
            raw = torch.empty(nbytes + 2 * mmap.PAGESIZE, dtype=torch.uint8, pin_memory=bool(self._streams))
            held = self._held[use] = raw[-raw.data_ptr() % mmap.PAGESIZE :]
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
