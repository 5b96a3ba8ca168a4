"""Memory that a trainer and its writer share: one staged state, and a header that says which one it is."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Final

HEADER_NBYTES: Final = mmap.PAGESIZE
"""The payload starts on a page of its own, so that ``O_DIRECT`` can read it."""

_STAMP: Final = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What a slot holds. ``sequence`` is odd while the trainer copies, and grows with every state."""

    sequence: int
    generation: int
    step: int

    @property
    def whole(self) -> bool:
        return self.sequence % 2 == 0 and self.sequence > 0


class Slot:
    """A file in memory, without a name, mapped by both processes; it goes when both are gone, however they end.

    Not limited by the size of ``/dev/shm`` (64 MB in many containers): an anonymous file counts as memory only.
    """

    def __init__(self, file: int) -> None:
        """Attach to a slot that another process made; the descriptor belongs to this object from now on."""
        self.file = file
        self._map = mmap.mmap(file, os.fstat(file).st_size)

    @classmethod
    def create(cls, name: str) -> Slot:
        """Make an empty slot; ``name`` is for people who look into ``/proc``."""
        file = os.memfd_create(f"resilient-{name}", os.MFD_CLOEXEC)
        os.ftruncate(file, HEADER_NBYTES)
        return cls(file)

    @property
    def nbytes(self) -> int:
        """How many bytes of payload fit, as this process has it mapped."""
        return len(self._map) - HEADER_NBYTES

    @property
    def payload(self) -> memoryview:
        """The staged bytes; the view stays valid when the slot grows, for what it held."""
        return memoryview(self._map)[HEADER_NBYTES:]

    @property
    def address(self) -> int:
        """Where the payload starts in this process; valid until the slot grows."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + HEADER_NBYTES

    def grow(self, nbytes: int) -> None:
        """Make room for ``nbytes`` of payload (trainer's side); contents stay. Never shrinks: others have it mapped."""
        if nbytes > self.nbytes:
            size = -(-(nbytes + HEADER_NBYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
            os.ftruncate(self.file, size)
            self._map = mmap.mmap(self.file, size)

    def refresh(self) -> None:
        """Map what the other side has added (writer's side)."""
        size = os.fstat(self.file).st_size
        if size > len(self._map):
            self._map = mmap.mmap(self.file, size)

    @property
    def stamp(self) -> Stamp:
        sequence, generation, step = _STAMP.unpack_from(self._map)
        return Stamp(sequence=sequence, generation=generation, step=step)

    def begin(self, *, generation: int, step: int) -> None:
        """Say that the payload is being replaced, before its first byte is."""
        sequence = self.stamp.sequence
        _STAMP.pack_into(self._map, 0, sequence + 1 + sequence % 2, generation, step)

    def seal(self) -> Stamp:
        """Say that the payload is whole."""
        stamp = self.stamp
        _STAMP.pack_into(self._map, 0, stamp.sequence + 1, stamp.generation, stamp.step)
        return self.stamp

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last mapping."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
