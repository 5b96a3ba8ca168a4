"""What this node does, ten times a second, on one time axis: processors, links, accelerators."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, NamedTuple

from resilient.clock import Clock
from resilient.events import Bus, MachineSampled, Notice
from resilient.observe.machine.counters import LOOPBACK, Link, Processors, open_links, total
from resilient.observe.machine.nvml import Accelerators, Nvml, open_nvml

_TELL_S: Final = 10.0
_JOIN_S: Final = 1.0
_NAN: Final = float("nan")


class LinkRate(NamedTuple):
    """What a link carried, in bytes a second, on average since it was asked last.

    ``capable``: what it can send; None if its driver does not say.
    """

    name: str
    sent: float
    received: float
    capable: float | None


class _Sample(NamedTuple):
    """What was read at one moment. It becomes numbers when it is told: that is cheaper for many at once."""

    at_s: float
    links: list[tuple[bytes, bytes]]
    processors: bytes
    accelerators: Accelerators | None


class MachineSampler:
    """A thread that reads a few small files every ``period_s`` and tells every ten seconds what it has read.

    Values: ``cpu``, ``sent_Bps`` and ``received_Bps`` of all links that lead out of the machine, ``loopback_Bps``
    (sent over the loopback, by which ranks of one machine exchange without accelerators), ``power_w`` and
    ``accelerator``; a name is there only where it can be read.
    """

    def __init__(self, *, rank: int, host: str, period_s: float, bus: Bus, clock: Clock, root: str = "/") -> None:
        self._rank = rank
        self._host = host
        self._period_s = period_s
        self._bus = bus
        self._clock = clock
        self._root = Path(root)
        self._links: list[Link] = []
        self._processors: Processors | None = None
        self._nvml: Nvml | None = None
        self._last: _Sample | None = None
        self._first: _Sample | None = None  # of what `rates` tells next
        self._told: _Sample | None = None  # the one before those that are told next
        self._began_s = 0.0  # of what is told next, by the monotonic clock
        self._began_at_s = 0.0  # the same, unix seconds
        self._samples: list[_Sample | None] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resilient-machine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End; what has been read is told. A read that hangs in a driver is not waited for for long."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def rates(self) -> list[LinkRate]:
        """Return what each link carried since this was asked last, the loopback last of all; from any one thread."""
        first, last = self._first, self._last
        if first is None or last is None or last.at_s <= first.at_s:
            return []
        self._first = last
        took_s = last.at_s - first.at_s
        found = []
        for link, before, after in zip(self._links, first.links, last.links, strict=True):
            old, new = link.traffic(before), link.traffic(after)
            sent, received = _rate(old.sent, new.sent, took_s), _rate(old.received, new.received, took_s)
            found.append(LinkRate(link.name, sent, received, link.capable))
        return found

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with ExitStack() as closing:
                self._open(closing)
                self._begin()
                self.sample()
                while not self._ended.wait(self._until_next()):
                    self.sample()
                    if len(self._samples) * self._period_s >= _TELL_S:
                        self.tell()
                self.tell()
        except Exception as error:  # noqa: BLE001 -- thread main: training goes on without being measured
            what = f"this machine is not measured any more: {type(error).__name__}: {error}"
            self._bus.emit(Notice(rank=self._rank, message=what))

    def _open(self, closing: ExitStack) -> None:
        self._links = open_links(self._root)
        for link in self._links:
            closing.callback(link.close)
        with suppress(OSError):
            self._processors = Processors(self._root)
            closing.callback(self._processors.close)
        self._nvml = open_nvml()
        if self._nvml is not None:
            closing.callback(self._nvml.close)

    def _begin(self) -> None:
        self._samples = []
        self._began_s, self._began_at_s = self._clock.monotonic(), self._clock.now().timestamp()

    def _until_next(self) -> float:
        """Return how long it is to the next point of the time axis; those that have been missed are left out."""
        passed = (self._clock.monotonic() - self._began_s) / self._period_s
        return (max(len(self._samples), math.floor(passed) + 1) - passed) * self._period_s

    def sample(self) -> None:
        """Read everything once, and put it where it belongs on the time axis."""
        now_s = self._clock.monotonic()
        sample = _Sample(
            now_s,
            [link.read() for link in self._links],
            b"" if self._processors is None else self._processors.read(),
            None if self._nvml is None else self._nvml.read(),
        )
        self._last = sample
        if self._first is None:
            self._first = sample
        place = max(len(self._samples), round((now_s - self._began_s) / self._period_s))
        self._samples += [None] * (place - len(self._samples))
        self._samples.append(sample)

    def tell(self) -> None:
        """Say what was read since the last time."""
        samples, began_s = self._samples, self._began_at_s
        self._begin()
        read = [{} if sample is None else self._values(sample) for sample in samples]
        names = sorted({name for values in read for name in values})
        if not names:
            return
        event = MachineSampled(
            rank=self._rank,
            host=self._host,
            began_s=began_s,
            period_s=self._period_s,
            values=tuple((name, tuple(values.get(name, _NAN) for values in read)) for name in names),
        )
        self._bus.emit(event)

    def _values(self, sample: _Sample) -> Mapping[str, float]:
        """Return what a sample says, with no more digits than mean something: they are kept for the life of the run."""
        before, self._told = self._told, sample
        values: dict[str, float] = {}
        if before is not None and sample.at_s > before.at_s:
            values |= self._rates_of(before, sample)
        busy = None if self._processors is None else self._processors.busy(sample.processors)
        if busy is not None:
            values["cpu"] = round(busy, 3)
        if sample.accelerators is not None:
            asked = {"power_w": sample.accelerators.power_w, "accelerator": sample.accelerators.busy}
            values |= {name: round(value, 3) for name, value in asked.items() if value is not None}
        return values

    def _rates_of(self, before: _Sample, now: _Sample) -> Mapping[str, float]:
        took_s = now.at_s - before.at_s
        outside: list[float] = []
        inside: list[float] = []
        received: list[float] = []
        for link, old, new in zip(self._links, before.links, now.links, strict=True):
            was, has = link.traffic(old), link.traffic(new)
            (inside if link.name == LOOPBACK else outside).append(_rate(was.sent, has.sent, took_s))
            if link.name != LOOPBACK:
                received.append(_rate(was.received, has.received, took_s))
        found = {"sent_Bps": total(outside), "received_Bps": total(received), "loopback_Bps": total(inside)}
        return {name: float(round(value)) for name, value in found.items() if not math.isnan(value)}


def _rate(before: int | None, now: int | None, took_s: float) -> float:
    """Return bytes a second; NaN if a counter cannot be read, or was set back."""
    return (now - before) / took_s if before is not None and now is not None and now >= before else _NAN
