"""Events as lines of JSON, and back."""

from __future__ import annotations

import math
from typing import Any, get_type_hints

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient import events
from resilient.format.journal import Header, Record, decode_segment, encode_header, encode_record, name_of

HEADER = Header(
    run_id="r", generation=1, nonce="n", launch="l", rank=3, world_size=8, host="h", pid=7, process_began_s=1.0,
    began_s=2.0, sla=0.9,
)  # fmt: skip
KINDS = [
    kind
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, events.Event) and kind is not events.Event
]
FINITE = st.floats(-1e6, 1e6).map(lambda value: round(value, 6))


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    if hint is float:
        return FINITE | st.just(math.nan)
    return st.none() | FINITE if hint == float | None else st.from_type(hint)


@st.composite
def records(draw: st.DrawFn) -> Record:
    kind = draw(st.sampled_from(KINDS))
    fields = {name: draw(of_type(hint)) for name, hint in get_type_hints(kind).items()}
    return Record(round(draw(st.floats(0, 2e9)), 3), kind(**fields))


def same(one: object, two: object) -> bool:
    if isinstance(one, float) and isinstance(two, float):
        finite = math.isfinite(one)
        return math.isclose(one, two, rel_tol=1e-5, abs_tol=1e-6) if finite else math.isnan(two)
    if isinstance(one, tuple) and isinstance(two, tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two


@settings(deadline=None)
@given(st.lists(records(), max_size=5))
def test_every_event_comes_back_as_it_was(told: list[Record]) -> None:
    segment = decode_segment(encode_header(HEADER) + b"".join(map(encode_record, told)))
    assert segment.header == HEADER
    assert segment.torn == 0
    assert [type(each.event) for each in segment.records] == [type(each.event) for each in told]
    for before, after in zip(told, segment.records, strict=True):
        assert after.at_s == before.at_s
        for name in get_type_hints(type(before.event)):
            assert same(getattr(before.event, name), getattr(after.event, name)), name


def test_what_is_unknown_is_passed_over_and_what_is_torn_is_counted() -> None:
    whole = encode_record(Record(5.0, events.HangOver(section="step", step=3)))
    grown = whole.replace(b'"step":3', b'"step":3,"colour":"red"')
    newer = b'{"at":9.0,"event":"of-a-newer-library","what":1}\n'
    segment = decode_segment(encode_header(HEADER) + whole + grown + newer + whole[:-9])
    assert segment.records == (Record(5.0, events.HangOver(section="step", step=3)),) * 2
    assert (segment.torn, segment.last_s) == (1, 9.0)


def test_only_what_is_wanted_is_read_and_the_newest_time_is_known_all_the_same() -> None:
    lines = [Record(float(n), events.Notice(message="x")) for n in range(9)]
    lines.insert(3, Record(2.5, events.HangOver(section="step", step=3)))
    data = encode_header(HEADER) + b"".join(map(encode_record, lines))
    segment = decode_segment(data, only={name_of(events.HangOver)})
    assert len(segment.records) == 1
    assert segment.last_s == 8.0


def test_a_name_is_that_of_the_class_with_hyphens() -> None:
    assert name_of(events.SaveCommitted) == "save-committed"
    assert len({name_of(kind) for kind in KINDS}) == len(KINDS)


def test_what_json_cannot_have_is_written_down_all_the_same() -> None:
    """A name of a file that is no UTF-8, in the very error that ends a life; numbers of numpy."""
    told = events.Ended(step=np.int64(7), how="failed", error="FileNotFoundError: caf\udce9.bin")  # type: ignore[arg-type]
    numbers = events.SaveFenced(step=3, waited_s=np.float64(0.25))
    segment = decode_segment(b"".join([encode_header(HEADER), *map(encode_record, map(at_1, (told, numbers)))]))
    assert segment.torn == 0
    first, second = (each.event for each in segment.records)
    assert first == events.Ended(step=7, how="failed", error="FileNotFoundError: caf?.bin")
    assert second == events.SaveFenced(step=3, waited_s=0.25)


def at_1(event: events.Event) -> Record:
    return Record(1.0, event)
