"""Whether tensors have changed while they were copied.

In-place operations count a tensor's version up. Fused optimizers and edits through ``tensor.data`` do not (torch 2.13),
so a few bytes of each copy are kept from before it began, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from resilient.engine.copying import Copy, Segments, Target, write_segments
from resilient.writer.slot import HEADER_NBYTES, Slot

_SAMPLE_NBYTES: Final = 64

_version = attrgetter("_version")  # the documented way to see changes


class Probe:
    """Some of the bytes that are to be copied, of each copy, as they were when `take` was called.

    They are kept at some place in memory of the caller's, which has ``nbytes`` for them.
    """

    def __init__(self, copies: Iterable[Copy]) -> None:
        sources: list[Segments] = []
        ats: list[NDArray[np.uint64]] = []
        leaves: list[int] = []
        for copy in copies:
            segments, places = copy.segments()
            sources.append(segments)
            ats.append(places)
            leaves += copy.leaves if len(copy.leaves) == len(segments) else list(copy.leaves) * len(segments)
        everything = np.concatenate(sources) if sources else np.empty((0, 2), dtype=np.uint64)
        starts, lengths, of = _samples(everything[:, 1])
        self._leaves = np.array(leaves, dtype=np.int64)[of]
        self._live = np.stack([everything[of, 0] + starts, lengths], axis=1)
        self._copied_at = (np.concatenate(ats) if ats else np.empty(0, dtype=np.uint64))[of] + starts
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self._half = int(lengths.sum())
        self.nbytes = 2 * self._half

    def take(self, kept: Slot, at: int) -> None:
        """Keep what is there now."""
        write_segments(kept.file, HEADER_NBYTES + at, self._live)

    def changed(self, kept: Slot, at: int, target: Target) -> set[int]:
        """Return the leaves of which the copy does not have what was kept."""
        copied = self._live.copy()
        copied[:, 0] = self._copied_at + np.uint64(target.address)
        write_segments(kept.file, HEADER_NBYTES + at + self._half, copied)
        before = kept.payload[at : at + self._half]
        after = kept.payload[at + self._half : at + self.nbytes]
        if before == after:
            return set()
        different = np.flatnonzero(np.frombuffer(before, dtype=np.uint8) != np.frombuffer(after, dtype=np.uint8))
        return set(self._leaves[np.searchsorted(self._ends, different, side="right")].tolist())


def _samples(lengths: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int64]]:
    """Return where in which range samples lie: start, length, and the number of the range."""
    size = np.uint64(_SAMPLE_NBYTES)
    whole = np.flatnonzero(lengths <= 3 * size)
    long = np.flatnonzero(lengths > 3 * size)
    middle, end = lengths[long] // np.uint64(2), lengths[long] - size
    starts = np.concatenate([np.zeros(len(whole) + len(long), dtype=np.uint64), middle, end])
    sizes = np.concatenate([lengths[whole], np.full(3 * len(long), size, dtype=np.uint64)])
    return starts, sizes, np.concatenate([whole, long, long, long])


def versions_of(tensors: Collection[torch.Tensor]) -> list[int]:
    """Return how often each tensor was changed in place; 0 for those that do not count (inference tensors)."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return [0 if tensor.is_inference() else _version(tensor) for tensor in tensors]
