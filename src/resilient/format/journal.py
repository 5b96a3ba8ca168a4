"""Events as lines of JSON: what a rank writes down beside the checkpoints, for the account of the run.

The first line of each segment is a header; each other one is a record: ``at`` (unix seconds), ``event`` (the name of
its class with hyphens), then its fields. Names and fields are only ever added: a reader passes over events that it does
not know, and over fields that it does not. What is not finite is null.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from functools import cache
from numbers import Integral
from typing import Any, Final, get_type_hints

import msgspec

from resilient import events

VERSION: Final = 1

_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Whose journal this is. Times are unix seconds; ``sla``: the share of productive time that was promised."""

    journal: int = VERSION
    run_id: str
    generation: int
    nonce: str
    launch: str
    rank: int
    world_size: int
    host: str
    pid: int
    process_began_s: float
    began_s: float
    sla: float | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """An event, and when it was told, in unix seconds."""

    at_s: float
    event: events.Event


@dataclass(frozen=True, slots=True)
class Segment:
    """What was read of one segment. ``torn``: lines that could not be read, as the last one of a torn write.

    ``last_s``: when its newest record was told, be it wanted or not, in unix seconds; 0 if there is none.
    """

    header: Header | None
    records: tuple[Record, ...]
    torn: int
    last_s: float = 0.0


def name_of(kind: type[events.Event]) -> str:
    """Return the name of an event in a journal: ``SaveCommitted`` is "save-committed"."""
    return _HUMP.sub("-", kind.__name__).lower()


def encode_header(header: Header) -> bytes:
    """Return the first line of a segment."""
    return msgspec.json.encode(header) + b"\n"


def encode_record(record: Record) -> bytes:
    """Return one line; whatever the fields hold: an error may have any text, and numbers may be of any library."""
    members = {each.name: _cut(getattr(record.event, each.name)) for each in fields(record.event)}
    return msgspec.json.encode({"at": round(record.at_s, 3), "event": name_of(type(record.event)), **members}) + b"\n"


def decode_segment(data: bytes, *, only: Collection[str] | None = None) -> Segment:
    """Return what can be read of a segment; nothing that is damaged raises.

    ``only``: names of the events that are wanted; those of a thousand ranks take long to read.
    """
    header, records, torn, last_s = None, [], 0, 0.0
    for number, line in enumerate(data.splitlines()):
        try:
            members = msgspec.json.decode(line)
            if number == 0:
                header = msgspec.convert(members, Header)
                continue
            last_s = max(last_s, float(members["at"]))
            if (only is None or members["event"] in only) and (record := _record(members)) is not None:
                records.append(record)
        except (ValueError, TypeError, KeyError, AttributeError, msgspec.MsgspecError):
            torn += 1
    return Segment(header, tuple(records), torn, last_s)


def _record(members: dict[str, Any]) -> Record | None:
    at_s, kind = float(members.pop("at")), _kinds().get(members.pop("event"))
    if kind is None:
        return None  # of a newer library
    floats = _floats(name_of(kind))
    return Record(at_s, msgspec.convert(_finite_or_nan(members, floats), kind, strict=False))


def _cut(value: Any) -> Any:
    """Return a value for JSON, its numbers cut to what a reader can use: microseconds, and six digits of samples."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return round(float(value), 6) if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_digits(each) if isinstance(each, float) else _cut(each) for each in value]
    if isinstance(value, Integral):
        return int(value)
    # The name of a file that is no UTF-8 has surrogates, which JSON cannot have.
    return str(value).encode("utf-8", "replace").decode()


def _digits(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _finite_or_nan(members: dict[str, Any], floats: frozenset[str]) -> dict[str, Any]:
    return {
        name: math.nan if value is None and name in floats else _nan_within(value) for name, value in members.items()
    }


def _nan_within(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [math.nan if each is None else _nan_within(each) for each in value]


@cache
def _kinds() -> dict[str, type[events.Event]]:
    return {name_of(kind): kind for kind in _below(events.Event)}


def _below(kind: type[events.Event]) -> Iterable[type[events.Event]]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


@cache
def _floats(name: str) -> frozenset[str]:
    return frozenset(field for field, hint in get_type_hints(_kinds()[name]).items() if hint is float)
