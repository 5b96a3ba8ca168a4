"""Where a trainer is, in a page of memory that it shares with whoever watches it: written in a microsecond, read live.

The page outlives neither the machine nor the generation, so it has the byte order and the alignment of the machine. It
is one file in a directory of its generation, so that the watchers of all ranks of a node can read all of them.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.policy.progress import Glance, Seen

_MAGIC: Final = b"RSLTPAGE"
_VERSION: Final = 1
_SIZE: Final = 4096

_HEAD: Final = struct.Struct("@8sQQQQQ")  # magic, version, process, rank, signal for stacks, thread that trains

# Everything that changes is a word of eight bytes, written by one store each: `struct` would clear the place first, and
# whoever looks in that moment would find a rank that has never beaten.
_BEAT: Final = 8  # a float
_CLOSED: Final = 9
_BEGUN: Final = 10  # the number of the mark
_CURRENT: Final = 11  # the section
_STEP: Final = 12
_STARTED: Final = 13  # a float
_DONE: Final = 14  # the number of the mark again

_SECTIONS_AT: Final = 128
_SECTION_NBYTES: Final = 64
_NAME_NBYTES: Final = 40
_COUNT: Final = 5  # words into a section
_LONGEST: Final = 6  # a float
_MOST: Final = (_SIZE - _SECTIONS_AT) // _SECTION_NBYTES
_WORD_NBYTES: Final = 8
_TRIES: Final = 100

OTHER: Final = "other"
"""The section of all names that have found no room any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose page it is. ``signal``: what makes the process write its stacks, 0 if nothing does."""

    pid: int
    rank: int
    signal: int
    thread: int


class Page:
    """The writer's side: one thread moves through sections, another one beats."""

    def __init__(self, path: Path, owner: Owner, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Make the file; raises OSError. The first section is what `section` is called for first."""
        self.path = path
        self._clock = clock
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Not a hole: where memory has run out, the first mark in one would end the process by SIGBUS.
            os.posix_fallocate(file, 0, _SIZE)
            self._memory = mmap.mmap(file, _SIZE)
        finally:
            os.close(file)
        self._words = memoryview(self._memory).cast("q")
        self._floats = memoryview(self._memory).cast("d")
        self._names: dict[str, int] = {}
        self._stats: list[tuple[int, float]] = []
        self._number = 0
        self._current = 0
        self._step = 0
        self._outer: list[tuple[int, float, float]] = []
        self._started_s = clock.monotonic()
        self.section(OTHER)
        self.beat()
        self._write()
        # Last: a page without a head is none yet.
        _HEAD.pack_into(self._memory, 0, _MAGIC, _VERSION, owner.pid, owner.rank, owner.signal, owner.thread)

    def section(self, name: str) -> int:
        """Return the number of a section, for `turn_to` and `enter`; a new name gets one."""
        known = self._names.get(name)
        if known is not None:
            return known
        if len(self._stats) == _MOST:
            return self._names[OTHER]
        number = self._names[name] = len(self._stats)
        self._stats.append((0, 0.0))
        label = name.encode()[:_NAME_NBYTES]
        at = _SECTIONS_AT + number * _SECTION_NBYTES
        self._memory[at : at + len(label)] = label
        return number

    def turn_to(self, section: int, step: int) -> float:
        """End the section that goes on, and begin another one after ``step`` complete steps; return how long it was."""
        now_s = self._clock.monotonic()
        duration_s = now_s - self._started_s
        self._note(duration_s)
        self._current, self._step, self._started_s = section, step, now_s
        self._write()
        return duration_s

    def enter(self, section: int) -> None:
        """Begin a section within another one, whose clock stands still meanwhile."""
        now_s = self._clock.monotonic()
        self._outer.append((self._current, self._started_s, now_s))
        self._current, self._started_s = section, now_s
        self._write()

    def leave(self) -> float:
        """End that section, and go on with the one around it; return how long it was."""
        now_s = self._clock.monotonic()
        duration_s = now_s - self._started_s
        self._note(duration_s)
        self._current, started_s, entered_s = self._outer.pop()
        self._started_s = started_s + (now_s - entered_s)
        self._write()
        return duration_s

    def beat(self) -> None:
        """Show that the interpreter lives; on a thread of its own."""
        self._floats[_BEAT] = self._clock.monotonic()

    def close(self) -> None:
        """Show that the end is a planned one. Later marks do no harm. Idempotent."""
        self._words[_CLOSED] = 1

    def _note(self, duration_s: float) -> None:
        count, longest_s = self._stats[self._current]
        self._stats[self._current] = (count + 1, max(longest_s, duration_s))
        first = _word_of(self._current)
        if duration_s > longest_s:
            self._floats[first + _LONGEST] = duration_s
        self._words[first + _COUNT] = count + 1

    def _write(self) -> None:
        words = self._words
        self._number = number = self._number + 1
        # The number before and after: a reader that begins with the one after sees when the rest has changed meanwhile.
        words[_BEGUN] = number
        words[_CURRENT] = self._current
        words[_STEP] = self._step
        self._floats[_STARTED] = self._started_s
        words[_DONE] = number


class PageView:
    """The reader's side."""

    def __init__(self, path: Path) -> None:
        """Open a page; raises OSError if there is none, ValueError if it is none of this version, or not yet one."""
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
        self._words = memoryview(self._memory).cast("q")
        self._floats = memoryview(self._memory).cast("d")
        magic, version, pid, rank, number, thread = _HEAD.unpack_from(self._memory, 0)
        if magic != _MAGIC or version != _VERSION:
            self.close()
            raise ValueError(f"{path} is no page of this version")
        self._whole = (0, 0, 0, self._floats[_STARTED])
        self.owner = Owner(pid=pid, rank=rank, signal=number, thread=thread)

    @property
    def closed(self) -> bool:
        """Whether the owner has ended as planned."""
        return bool(self._words[_CLOSED])

    def glance(self) -> Glance:
        """Return where the owner is."""
        words, floats = self._words, self._floats
        for _ in range(_TRIES):
            number = words[_DONE]
            section, step, started_s = words[_CURRENT], words[_STEP], floats[_STARTED]
            if words[_BEGUN] == number:
                self._whole = (number, section, step, started_s)
                break
        # A writer that was held up in the middle of a mark, perhaps for ever, is where the mark before says.
        number, section, step, started_s = self._whole
        name, seen = self._section(section)
        return Glance(beat_s=floats[_BEAT], section=name, step=step, started_s=started_s, mark=number, seen=seen)

    def seen(self) -> dict[str, Seen]:
        """Return what was seen of each section so far."""
        found = (self._section(number) for number in range(_MOST))
        return {name: seen for name, seen in found if name}

    def close(self) -> None:
        self._words.release()
        self._floats.release()
        self._memory.close()

    def _section(self, number: int) -> tuple[str, Seen]:
        at, first = _SECTIONS_AT + number * _SECTION_NBYTES, _word_of(number)
        name = self._memory[at : at + _NAME_NBYTES].rstrip(b"\0").decode(errors="replace")
        return name, Seen(count=self._words[first + _COUNT], longest_s=self._floats[first + _LONGEST])


def _word_of(section: int) -> int:
    return (_SECTIONS_AT + section * _SECTION_NBYTES) // _WORD_NBYTES
