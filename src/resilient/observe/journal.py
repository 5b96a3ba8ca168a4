"""A sink that keeps events until somebody writes them down: quick to take them, bounded, and cut into segments.

Stores cannot append: the newest segment is written again whole until it is full, and then left alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from resilient.clock import Clock
from resilient.events import Event, MachineSampled, Notice
from resilient.format.journal import Header, Record, encode_header, encode_record

EVENTS: Final = "events"
MACHINE: Final = "machine"
"""A stream of its own: samples are many, and only the newest hours of them are kept."""

SEGMENT_NBYTES: Final = 64 << 10
_MOST_SEGMENTS: Final = {EVENTS: 256, MACHINE: 64}
"""Of one rank and generation: the first quarter stays, and of the others the newest."""

_MOST_WAITING: Final = 10_000

Put = Callable[[str, int, bytes], None]
"""Stores a segment: the stream, the number, the bytes."""

Delete = Callable[[str, int], None]


class Journal:
    """What one rank has to write down. A full queue, as of a store that is away for hours, loses the oldest."""

    def __init__(self, clock: Clock, *, important: Callable[[Event], bool] = lambda _: False) -> None:
        """``important``: what should be written down soon; see `wake`."""
        self._clock = clock
        self._important = important
        self._waiting: deque[Record] = deque(maxlen=_MOST_WAITING)
        self._lost = 0
        self._streams: dict[str, _Stream] = {}
        self.wake = threading.Event()
        """Set when something important has come; whoever writes clears it."""

    def __call__(self, event: Event) -> None:
        """Take an event; in the thread that reports it, for about a microsecond."""
        self._lost += len(self._waiting) == _MOST_WAITING
        self._waiting.append(Record(self._clock.now().timestamp(), event))
        if self._important(event):
            self.wake.set()

    def write(self, header: Header, put: Put, delete: Delete) -> None:
        """Write down what has come since the last time. If that fails, nothing is lost: the next time writes it, too.

        Raises:
            StoreError: the store does not take it.
        """
        if self._lost:
            lost, self._lost = self._lost, 0
            self(Notice(message=f"{lost} events are not written down: the store took none for too long"))
        while self._waiting:
            record = self._waiting.popleft()
            name = MACHINE if isinstance(record.event, MachineSampled) else EVENTS
            stream = self._streams.setdefault(name, _Stream(name, encode_header(header)))
            stream.add(encode_record(record))
        for stream in self._streams.values():
            stream.write(put, delete)


class _Stream:
    """Segments of one kind: those that wait to be written, of which the last one is still open."""

    def __init__(self, name: str, header: bytes) -> None:
        self._name = name
        self._header = header
        self._open = bytearray(header)
        self._number = 0
        self._dirty = False
        self._full: deque[tuple[int, bytes]] = deque()
        self._doomed: deque[int] = deque()

    def add(self, line: bytes) -> None:
        if len(self._open) + len(line) > SEGMENT_NBYTES and len(self._open) > len(self._header):
            self._full.append((self._number, bytes(self._open)))
            if len(self._full) > _MOST_SEGMENTS[self._name]:
                del self._full[_MOST_SEGMENTS[self._name] // 4]  # as of those that are written: the first ones stay
            self._number += 1
            self._open = bytearray(self._header)
            old = self._number - _MOST_SEGMENTS[self._name]
            first = _MOST_SEGMENTS[self._name] // 4
            if old >= 0:
                self._doomed.append(first + old)
        self._open += line
        self._dirty = True

    def write(self, put: Put, delete: Delete) -> None:
        while self._full:
            put(self._name, *self._full[0])
            self._full.popleft()
        if self._dirty:
            put(self._name, self._number, bytes(self._open))
            self._dirty = False
        while self._doomed:
            delete(self._name, self._doomed[0])
            self._doomed.popleft()
