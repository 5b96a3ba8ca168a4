"""The queue of what is to be written down: cut into segments, bounded, and nothing lost by a store that is away."""

from __future__ import annotations

import pytest

from resilient import events
from resilient.clock import SYSTEM_CLOCK
from resilient.errors import ErrorKind, StoreError
from resilient.format.journal import Header, decode_segment
from resilient.observe import journal as module
from resilient.observe.journal import SEGMENT_NBYTES, Journal

HEADER = Header(
    run_id="r", generation=1, nonce="n", launch="l", rank=0, world_size=1, host="h", pid=7, process_began_s=1.0,
    began_s=2.0,
)  # fmt: skip


class Place:
    """Segments by stream and number; away when it is told to be."""

    def __init__(self) -> None:
        self.segments: dict[tuple[str, int], bytes] = {}
        self.away = False
        self.puts = 0

    def put(self, stream: str, number: int, data: bytes) -> None:
        if self.away:
            raise StoreError("away", kind=ErrorKind.UNREACHABLE, retryable=True)
        self.puts += 1
        self.segments[stream, number] = data

    def delete(self, stream: str, number: int) -> None:
        self.segments.pop((stream, number), None)

    def messages(self) -> list[str]:
        return [
            each.event.message
            for key in sorted(self.segments)
            for each in decode_segment(self.segments[key]).records
            if isinstance(each.event, events.Notice)
        ]


def test_segments_are_full_before_the_next_one_begins_and_each_can_be_read_alone() -> None:
    place, told = Place(), Journal(SYSTEM_CLOCK)
    for number in range(3000):
        told(events.Notice(message=f"{number:04d} {'x' * 60}"))
        if number % 100 == 99:
            told.write(HEADER, place.put, place.delete)
    assert [message[:4] for message in place.messages()] == [f"{number:04d}" for number in range(3000)]
    sizes = [len(place.segments[key]) for key in sorted(place.segments)]
    assert max(sizes) <= SEGMENT_NBYTES
    assert min(sizes[:-1]) > SEGMENT_NBYTES - 200
    assert all(decode_segment(data).header == HEADER for data in place.segments.values())
    puts = place.puts
    told.write(HEADER, place.put, place.delete)
    assert place.puts == puts, "nothing new, nothing written"


def test_a_store_that_is_away_costs_no_event() -> None:
    place, told = Place(), Journal(SYSTEM_CLOCK)
    for number in range(20):
        place.away = 3 <= number < 17
        told(events.Notice(message=f"{number:04d}"))
        if place.away:
            with pytest.raises(StoreError):
                told.write(HEADER, place.put, place.delete)
        else:
            told.write(HEADER, place.put, place.delete)
    assert place.messages() == [f"{number:04d}" for number in range(20)]


def test_a_long_life_leaves_its_beginning_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_SEGMENTS", {module.EVENTS: 8, module.MACHINE: 4})
    place, told = Place(), Journal(SYSTEM_CLOCK)
    for number in range(30_000):
        told(events.Notice(message=f"{number:06d} {'x' * 60}"))
        if number % 1000 == 0:
            told.write(HEADER, place.put, place.delete)
    told.write(HEADER, place.put, place.delete)
    assert len(place.segments) == 8
    numbers = [int(message[:6]) for message in place.messages()]
    assert numbers[0] == 0
    assert numbers[-1] == 29_999
    assert sum(map(len, place.segments.values())) <= 8 * SEGMENT_NBYTES


def test_samples_of_machines_crowd_out_nothing_else() -> None:
    place, told = Place(), Journal(SYSTEM_CLOCK)
    told(events.Notice(message="before"))
    values = (("cpu", tuple(0.123456789 + n for n in range(50))),)
    for number in range(100):
        told(events.MachineSampled(host="h", began_s=float(number), period_s=0.1, values=values))
    told(events.Notice(message="after"))
    told.write(HEADER, place.put, place.delete)
    assert place.messages() == ["before", "after"]
    assert len(place.segments[module.EVENTS, 0]) < 1000


def test_what_is_important_wakes_whoever_writes() -> None:
    told = Journal(SYSTEM_CLOCK, important=lambda event: isinstance(event, events.Stopped))
    told(events.Notice(message="no"))
    assert not told.wake.is_set()
    told(events.Stopped(step=1, kind="stop", why="", error=None, newest=None))
    assert told.wake.is_set()
