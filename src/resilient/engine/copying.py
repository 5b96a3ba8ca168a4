"""How bytes get from where a tensor lies into a slot, by one thread or several, without the interpreter's lock."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from resilient.clock import Clock, Deadline
from resilient.errors import ErrorKind, StoreError
from resilient.writer.slot import HEADER_NBYTES, Slot

MAX_SEGMENTS: Final = 1024  # IOV_MAX of Linux
_MAX_ELEMENTS: Final = 48
_TIMEOUT_S: Final = 600.0
_LOOK_S: Final = 1.0

# Functions of the C library release the interpreter's lock while they run.
_libc = ctypes.CDLL(None, use_errno=True)
_memmove = _libc.memmove
_memmove.argtypes, _memmove.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p
_memcmp = _libc.memcmp
_memcmp.argtypes, _memcmp.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int
_pwritev = _libc.pwritev
_pwritev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long)
_pwritev.restype = ctypes.c_ssize_t

Segments = NDArray[np.uint64]
"""Ranges of this process's memory, one row each: address and length, as the system's ``iovec``."""


class Target:
    """A slot while it is filled: where it is mapped does not change as long as this object lives."""

    def __init__(self, slot: Slot) -> None:
        self.payload = slot.payload
        self.address = slot.address
        self.file = slot.file


class Copy(Protocol):
    """Something to be copied into a slot at ``at``, and the leaves that it comes from."""

    @property
    def at(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def leaves(self) -> Sequence[int]: ...

    def segments(self) -> tuple[Segments, NDArray[np.uint64]]:
        """Return ranges of memory that are copied, all or some of them, and where in the slot each of them goes.

        They are of ``leaves`` one by one, or all of the only leaf.
        """
        ...

    def run(self, target: Target) -> None: ...

    def changed(self, target: Target) -> Sequence[int]:
        """Return the leaves of which there is something else now than what was copied."""
        ...


@dataclass(frozen=True, slots=True)
class Move:
    """A range of memory."""

    leaf: int
    source: int
    at: int
    nbytes: int

    @property
    def leaves(self) -> Sequence[int]:
        return (self.leaf,)

    def segments(self) -> tuple[Segments, NDArray[np.uint64]]:
        return np.array([[self.source, self.nbytes]], dtype=np.uint64), np.array([self.at], dtype=np.uint64)

    def run(self, target: Target) -> None:
        _memmove(target.address + self.at, self.source, self.nbytes)

    def changed(self, target: Target) -> Sequence[int]:
        return self.leaves if _memcmp(target.address + self.at, self.source, self.nbytes) else ()


@dataclass(frozen=True, slots=True)
class Gather:
    """Many small ranges of memory that are to lie back to back: one call of the system, however many they are."""

    leaves: Sequence[int]
    sources: Segments
    at: int
    nbytes: int

    def segments(self) -> tuple[Segments, NDArray[np.uint64]]:
        sizes = self.sources[:, 1]
        return self.sources, np.cumsum(sizes, dtype=np.uint64) - sizes + np.uint64(self.at)

    def run(self, target: Target) -> None:
        write_segments(target.file, HEADER_NBYTES + self.at, self.sources)

    def changed(self, target: Target) -> Sequence[int]:
        found = []
        at = target.address + self.at
        for leaf, (source, nbytes) in zip(self.leaves, self.sources.tolist(), strict=True):
            if _memcmp(at, source, nbytes):
                found.append(leaf)
            at += nbytes
        return found


@dataclass(frozen=True, slots=True)
class Read:
    """Elements that lie in memory in another order than they are stored in.

    By NumPy, because a large ``copy_`` of torch would start threads for every thread that calls it.
    """

    leaf: int
    source: torch.Tensor
    at: int
    nbytes: int

    @property
    def leaves(self) -> Sequence[int]:
        return (self.leaf,)

    def segments(self) -> tuple[Segments, NDArray[np.uint64]]:
        size, count = self.source.element_size(), self.source.numel()
        some = np.unique(np.linspace(0, count - 1, _MAX_ELEMENTS).astype(np.int64))
        at = np.zeros(len(some), dtype=np.int64)
        for indices, stride in zip(np.unravel_index(some, tuple(self.source.shape)), self.source.stride(), strict=True):
            at += indices * stride
        addresses = self.source.data_ptr() + at * size
        return np.stack([addresses, np.full_like(addresses, size)], axis=1).astype(np.uint64), (
            some * size + self.at
        ).astype(np.uint64)

    def run(self, target: Target) -> None:
        np.copyto(*self._arrays(target))

    def changed(self, target: Target) -> Sequence[int]:
        stored, live = self._arrays(target)
        return self.leaves if stored.tobytes() != live.tobytes() else ()

    def _arrays(self, target: Target) -> tuple[NDArray[Any], NDArray[Any]]:
        same_bits, bits = _BITS[self.source.element_size()]
        stored = np.frombuffer(target.payload, dtype=bits, count=self.source.numel(), offset=self.at)
        return stored.reshape(tuple(self.source.shape)), self.source.view(same_bits).numpy()


_BITS: Final = {
    1: (torch.uint8, "u1"),
    2: (torch.int16, "i2"),
    4: (torch.int32, "i4"),
    8: (torch.int64, "i8"),
    16: (torch.complex128, "c16"),
}
"""NumPy has no bfloat16 and the like: elements are copied as others of their size."""


def write_segments(file: int, at: int, segments: Segments) -> None:
    """Write ranges of memory back to back into a file; raise `StoreError` if one of them is not there any more."""
    for start in range(0, len(segments), MAX_SEGMENTS):
        some = segments[start : start + MAX_SEGMENTS]
        nbytes = int(some[:, 1].sum())
        written = _pwritev(file, some.ctypes.data, len(some), at)
        if written != nbytes:
            reason = os.strerror(ctypes.get_errno()) if written < 0 else f"{written} of {nbytes} bytes"
            raise StoreError(f"tensors could not be copied: {reason}", kind=ErrorKind.SAVE_FAILED)
        at += nbytes


class CopyJob:
    """Copies that several threads share: each takes the next one until none is left.

    The thread that trains may be interrupted anywhere, by a signal whose handler raises. What it had in hand is then
    made again by another thread. Nothing here holds a lock: an interrupt between taking and keeping it would leave it
    locked for ever.
    """

    def __init__(self, copies: Sequence[Copy], run: Callable[[Copy], None]) -> None:
        self._copies = copies
        self._run = run
        self._total = len(copies)
        self._open = deque(range(self._total))
        self._done: set[int] = set()
        self._news: SimpleQueue[None] = SimpleQueue()
        self.error: Exception | None = None

    def work(self) -> None:
        """Copy until all copies are taken; the first ``error``, which is not raised, ends the copying."""
        mine: list[int] = []
        try:
            while self._open:
                # One call, in which no signal is handled: what is taken from there is here, whatever happens next.
                mine.extend(map(deque.popleft, (self._open,)))
                self._copy(mine[0])
                mine.clear()
        except IndexError:
            return  # another thread was quicker
        except BaseException:
            self._open.extend(mine)
            self._news.put(None)
            raise

    def wait(self, clock: Clock) -> None:
        """Return when nothing is read any more; copy meanwhile what is left, or given back by another thread."""
        deadline = Deadline(clock, _TIMEOUT_S)
        while True:
            self.work()
            if self._is_done:
                self._news.put(None)  # for the next one who waits
                return
            if deadline.expired:
                raise StoreError(
                    f"{self._total - len(self._done)} copies of tensors are not done after {_TIMEOUT_S:g} s:"
                    " their threads do not run",
                    kind=ErrorKind.DEADLINE,
                )
            with suppress(Empty):  # whoever took the news may have been interrupted before it had passed them on
                self._news.get(timeout=min(_LOOK_S, deadline.remaining_s))

    def stop(self, error: Exception) -> None:
        """Begin no copy any more."""
        if self.error is None:
            self.error = error

    def forget(self) -> None:
        """Let go of what was copied, when all of it is."""
        self._copies = ()

    @property
    def _is_done(self) -> bool:
        return len(self._done) == self._total

    def _copy(self, number: int) -> None:
        if number in self._done:
            return  # its thread was interrupted right after it: nobody expects that it is read any more
        try:
            if self.error is None:
                self._run(self._copies[number])
        except Exception as error:  # noqa: BLE001 -- boundary: whoever waits for the job finds it there
            self.error = error
        self._done.add(number)
        if self._is_done:
            self._news.put(None)
