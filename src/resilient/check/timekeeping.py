"""Whether something keeps this node's clock right: what the kernel says (adjtimex), and how far off it may be.

Clocks that are apart make records of two nodes impossible to order. Between nodes the offset is measured by pairs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

from resilient.check.context import Context
from resilient.check.limits import Limits
from resilient.check.result import Result, Status, skipped

NAME: Final = "clock"

_UNSYNCHRONIZED: Final = 0x0040  # STA_UNSYNC of <sys/timex.h>
_NANOSECONDS: Final = 0x2000  # STA_NANO: the offset is in nanoseconds
_ERROR: Final = 5  # TIME_ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Discipline:
    """What the kernel knows of its clock: ``offset_s`` is still to be corrected, ``estimate_s`` may be wrong."""

    synchronized: bool
    offset_s: float
    estimate_s: float


class _Timex(ctypes.Structure):
    """The head of Linux's ``struct timex``; what follows is never looked at."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 512),
    )


def check(context: Context) -> list[Result]:
    return [judge(read(), context.limits)]


def read() -> Discipline | None:
    """Return what the kernel says; None where it cannot be asked. Changes nothing: ``modes`` is 0."""
    timex = _Timex()
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    except AttributeError:
        return None  # not Linux
    if state < 0:
        return None
    unit_s = 1e-9 if timex.status & _NANOSECONDS else 1e-6
    return Discipline(
        synchronized=state != _ERROR and not timex.status & _UNSYNCHRONIZED,
        offset_s=timex.offset * unit_s,
        estimate_s=timex.esterror * 1e-6,
    )


def judge(found: Discipline | None, limits: Limits) -> Result:
    """Judge this clock by itself. A guest whose host keeps its time says "not synchronized", and may be right."""
    if found is None:
        return skipped(NAME, "the kernel does not say how right it is")
    if not found.synchronized:
        return skipped(
            NAME,
            "nothing that the kernel knows of keeps this clock right (chrony, ntpd, timesyncd); nodes may be apart",
        )
    off_s = max(abs(found.offset_s), found.estimate_s)
    off = off_s > limits.clock_s
    return Result(
        name=NAME,
        status=Status.FAILED if off else Status.OK,
        line=f"this clock is {off_s * 1e3:.1f} ms off" if off else f"is kept right to {off_s * 1e3:.3f} ms",
        remedy="look at `chronyc tracking`: the time server is far, or the clock was just started" if off else "",
        figure=off_s * 1e3,
        unit="ms",
        limit=limits.clock_s * 1e3,
    )
