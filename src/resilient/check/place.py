"""Whether the places where checkpoints go can be reached, used, and are fast enough."""

from __future__ import annotations

import secrets
from datetime import datetime
from typing import Final, Protocol, runtime_checkable

from resilient.catalog.doctor import examine
from resilient.check.context import Context
from resilient.check.limits import MIB, Limits
from resilient.check.result import Result, Status, at_least, failed, passed, skipped
from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.errors import ResilientError
from resilient.format.digest import digest
from resilient.format.layout import CONTROL
from resilient.store.base import Store
from resilient.store.open import open_store
from resilient.store.probe import probe

NAME: Final = "store"
BANDWIDTH: Final = "store bandwidth"
CLOCK: Final = "store clock"
PROMISES: Final = "store promises"


@runtime_checkable
class _Around(Protocol):
    @property
    def inner(self) -> Store: ...


@runtime_checkable
class _Timed(Protocol):
    def written_at(self, key: str) -> datetime: ...


def check(context: Context) -> list[Result]:
    """Probe each place, store and read an object there; full: look for every promise that `resilient doctor` does."""
    if not context.places:
        return [skipped(NAME, "no place was named (--place)")]
    return [result for place in context.places for result in of_place(place, context)]


def of_place(place: str, context: Context) -> list[Result]:
    store = open_store(place)
    try:
        probe(store)
        results = [passed(NAME, "can be listed, written, read and cleaned", subject=store.url)]
        results += measured(store, int(context.chosen(16, 128)) * MIB, context.limits)
        if context.full:
            results.append(_promises(store))
    except ResilientError as error:
        return [failed(NAME, str(error), error.hint or f"run `resilient doctor {store.url}`", subject=store.url)]
    finally:
        store.close()
    return results


def measured(store: Store, nbytes: int, limits: Limits, clock: Clock = SYSTEM_CLOCK) -> list[Result]:
    """Store an object of ``nbytes`` and read it back, and compare the clocks; nothing stays."""
    key, part = f"{CONTROL}check-{secrets.token_hex(8)}", secrets.token_bytes(MIB)
    into = bytearray(nbytes)
    try:
        start = clock.monotonic()
        store.put(key, [part] * (nbytes // MIB))
        put_s = clock.monotonic() - start
        offset_s = clock_offset_s(store, key, clock)
        start = clock.monotonic()
        store.read_into(key, 0, memoryview(into))
        read_s = clock.monotonic() - start
    finally:
        store.delete(key)
    if digest(into) != digest(part * (nbytes // MIB)):
        remedy = f"run `resilient doctor {store.url}`; no checkpoint there is safe"
        return [failed(BANDWIDTH, "what was read back is not what was stored", remedy, subject=store.url)]
    return [
        judge_bandwidth(nbytes / put_s, nbytes / read_s, limits, subject=store.url),
        judge_clock(offset_s, limits, subject=store.url),
    ]


def judge_bandwidth(put_rate: float, read_rate: float, limits: Limits, *, subject: str = "") -> Result:
    """Judge bytes a second by one connection's worth of requests."""
    result = Result(
        name=BANDWIDTH,
        status=Status.OK,
        line=f"stores; reads {read_rate / MIB:,.0f} MiB/s",
        subject=subject,
        figure=put_rate / MIB,
        unit="MiB/s",
        limit=limits.place_rate / MIB,
    )
    return at_least(
        result,
        slow_line=f"stores only {put_rate / MIB:.1f} MiB/s",
        remedy="compare with another node: if only this one is slow, look at its network links; else at the store",
    )


def clock_offset_s(store: Store, key: str, clock: Clock = SYSTEM_CLOCK) -> float | None:
    """Return by how much the store's clock is ahead, as an object just written shows; None if it shows none."""
    inner = store
    while isinstance(inner, _Around):
        inner = inner.inner
    if not isinstance(inner, _Timed):
        return None
    return (inner.written_at(key) - clock.now()).total_seconds()


def judge_clock(offset_s: float | None, limits: Limits, *, subject: str = "") -> Result:
    """Judge an offset in seconds. Stores show whole seconds: between nodes it is measured better, by pairs."""
    if offset_s is None:
        return skipped(CLOCK, "the store does not show its clock", subject=subject)
    off = abs(offset_s) > limits.place_clock_s
    ahead = "ahead of" if offset_s < 0 else "behind"
    return Result(
        name=CLOCK,
        status=Status.FAILED if off else Status.OK,
        line=f"this node's clock is {abs(offset_s):.0f} s {ahead} the store's" if off else "agrees to a second or two",
        remedy="start chrony or systemd-timesyncd on this node: stores refuse signatures that are too old"
        if off
        else "",
        subject=subject,
        figure=offset_s,
        unit="s",
        limit=limits.place_clock_s,
    )


def _promises(store: Store) -> Result:
    broken = [finding for finding in examine(store) if not finding.ok]
    if not broken:
        return passed(PROMISES, "keeps all that saving and resuming rest on", subject=store.url)
    line = f"{broken[0].name}: {broken[0].detail}"
    return failed(PROMISES, line, f"run `resilient doctor {store.url}`; no run is safe there", subject=store.url)
