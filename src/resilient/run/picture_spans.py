"""How long a step exchanged while nothing was computed, from the events of torch's profiler.

On processors a collective of gloo (or MPI, UCC) is an asynchronous event, ``gloo:all_reduce``, from the call to the end
of the transfer. Something is computed while an operator runs that calls no other one: an operator of DTensor or of
functional collectives may wait within itself, and what it calls tells. The moments between two operators belong to
computing too: autograd and Python take them.

On accelerators a collective is a kernel whose name begins with "nccl" (RCCL's do as well), and every other kernel or
copy computes: the rule of Meta's Holistic Trace Analysis. The time on the device of ``optimizer.step()`` is that of the
annotation which torch makes of it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from torch.autograd import DeviceType

Span: TypeAlias = tuple[int, int]
"""Begin and end, in nanoseconds."""

_COLLECTIVE: Final = re.compile(r"(gloo|mpi|ucc|nccl|xccl|hccl|fake):")
_OPTIMIZER: Final = "Optimizer.step#"
_OF_FUNCTIONS: Final = 0  # RecordScope.FUNCTION
_BETWEEN_NS: Final = 100_000
"""Shorter than that is no wait but the way from one operator to the next: up to some ten microseconds in profiles."""


class Event(NamedTuple):
    """What is used of one event of the profiler; ``kind`` is what torch calls its activity type."""

    name: str
    kind: str
    on_device: bool
    scope: int
    thread: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What one profiled step shows, in seconds.

    ``optimizer_s``: of it within ``optimizer.step()``, which is told as the optimizer's otherwise.
    ``device_optimizer_s``: the time of ``optimizer.step()`` on the accelerator; None where there is none.
    """

    exchange_s: float
    optimizer_s: float = 0.0
    device_optimizer_s: float | None = None


def read(events: Iterable[Any], *, device: bool) -> list[Event]:
    """Return what is used of torch's own records (``KinetoEvent``); ``device``: some may be of an accelerator.

    Each question is a call from Python into C++, of which a step has tens of thousands: no more of them than needed.
    """
    return [
        Event(
            event.name(),
            event.activity_type() if device else "",
            device and event.device_type() != DeviceType.CPU,
            event.scope(),
            event.start_thread_id(),
            event.start_ns(),
            event.end_ns(),
        )
        for event in events
    ]


def look(events: Sequence[Event]) -> Looked:
    """Return how long the step of these events exchanged while nothing was computed."""
    if any(event.on_device for event in events):
        return _on_device(events)
    exchange = _union((e.begin_ns, e.end_ns) for e in events if _COLLECTIVE.match(e.name))
    if not exchange:
        return Looked(exchange_s=0.0)
    waiting = _without(exchange, _union(_computing(events), within_ns=_BETWEEN_NS))
    steps = _union((e.begin_ns, e.end_ns) for e in events if e.name.startswith(_OPTIMIZER))
    elsewhere = _without(waiting, steps)
    return Looked(exchange_s=_seconds(waiting), optimizer_s=_seconds(waiting) - _seconds(elsewhere))


def _on_device(events: Sequence[Event]) -> Looked:
    work = [e for e in events if e.on_device and not e.kind.endswith("annotation")]
    exchange = _union((e.begin_ns, e.end_ns) for e in work if e.name.startswith("nccl"))
    computing = _union((e.begin_ns, e.end_ns) for e in work if not e.name.startswith("nccl"))
    steps = _union(
        (e.begin_ns, e.end_ns)
        for e in events
        if e.on_device and e.kind.endswith("annotation") and e.name.startswith(_OPTIMIZER)
    )
    waiting = _without(exchange, computing)
    return Looked(
        exchange_s=_seconds(waiting),
        optimizer_s=_seconds(waiting) - _seconds(_without(waiting, steps)),
        device_optimizer_s=_seconds(steps) if steps else None,
    )


def _computing(events: Sequence[Event]) -> list[Span]:
    """Return the spans of operators that call no other, but for those of collectives themselves."""
    threads: dict[int, list[tuple[int, int, str]]] = {}
    for event in events:
        if event.scope == _OF_FUNCTIONS:
            threads.setdefault(event.thread, []).append((event.begin_ns, -event.end_ns, event.name))
    found = []
    for operators in threads.values():
        operators.sort()
        for number, (begin, end, name) in enumerate(operators):
            last = number + 1 == len(operators) or operators[number + 1][0] >= -end
            if last and "c10d" not in name:
                found.append((begin, -end))
    return found


def _union(spans: Iterable[Span], *, within_ns: int = 0) -> list[Span]:
    """Return disjoint spans in order; those that are no further apart than ``within_ns`` are one."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1] + within_ns:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return what is left of disjoint, ordered spans without such others."""
    begins = [begin for begin, _ in others]
    found = []
    for span_begin, end in spans:
        begin = span_begin
        for other_begin, other_end in others[max(0, bisect_right(begins, begin) - 1) :]:
            if other_begin >= end:
                break
            if other_begin > begin:
                found.append((begin, other_begin))
            begin = max(begin, other_end)
        if begin < end:
            found.append((begin, end))
    return found


def _seconds(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans) / 1e9
