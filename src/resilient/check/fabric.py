"""Whether InfiniBand and RoCE ports are active, as fast as their like, and lose nothing.

``state`` (``4: ACTIVE``), ``phys_state`` (``5: LinkUp``), ``rate`` (``400 Gb/sec (4X NDR)``), ``counters/`` and
``hw_counters/`` of ``/sys/class/infiniband/*/ports/*``; Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from resilient.check.context import Context, read_number, read_text
from resilient.check.limits import Limits
from resilient.check.nics import judge_growth
from resilient.check.result import Result, Status, failed, passed, skipped
from resilient.clock import SYSTEM_CLOCK, Clock

NAME: Final = "RDMA link"
ERRORS: Final = "RDMA errors"

_COUNTERS: Final = (
    "counters/symbol_error",
    "counters/link_error_recovery",
    "counters/link_downed",
    "counters/port_rcv_errors",
    "counters/local_link_integrity_errors",
    "counters/excessive_buffer_overrun_errors",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/packet_seq_err",
    "hw_counters/out_of_sequence",
    "hw_counters/rnr_nak_retry_err",
    "hw_counters/roce_adp_retrans_to",
)
_ONCE: Final = ("link_downed", "link_error_recovery")


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """``state`` and ``physical`` are Linux's words in lower case; ``rate`` is Gbit/s."""

    name: str
    state: str
    physical: str
    layer: str
    rate: float | None
    counters: Mapping[str, int]


def check(context: Context) -> list[Result]:
    """Read twice, with a while between; see `resilient.check.nics`."""
    return watched(context, SYSTEM_CLOCK)


def watched(context: Context, clock: Clock) -> list[Result]:
    before, start = read(context), clock.monotonic()
    if not before:
        return [skipped(NAME, "no InfiniBand or RoCE here")]
    clock.sleep(context.chosen(1.0, 5.0))
    after, duration_s = read(context), clock.monotonic() - start
    return [*judge(after), *judge_errors(before, after, duration_s, context.limits)]


def read(context: Context) -> list[Port]:
    found = []
    for folder in sorted(context.path("sys/class/infiniband").glob("*/ports/*")):
        counts = {name.rpartition("/")[2]: read_number(folder / name) for name in _COUNTERS}
        found.append(
            Port(
                name=f"{folder.parent.parent.name}/{folder.name}",
                state=_word(folder / "state"),
                physical=_word(folder / "phys_state"),
                layer=read_text(folder / "link_layer") or "",
                rate=_rate(folder / "rate"),
                counters={name: count for name, count in counts.items() if count is not None},
            )
        )
    return found


def judge(ports: Sequence[Port]) -> list[Result]:
    """Return a line for each bad port, or one for all. A port that is disabled is nobody's fault."""
    used = [port for port in ports if port.physical != "disabled"]
    if not used:
        return [skipped(NAME, "every port is disabled")]
    results = []
    for port in used:
        fastest = max(other.rate or 0.0 for other in used if other.layer == port.layer)
        if port.state != "active":
            remedy = "check its cable or transceiver, the switch's port, and (InfiniBand) the subnet manager"
            line = f"{port.name} is down: {port.state}, {port.physical}"
            results.append(failed(NAME, line, remedy, subject=port.name))
        elif port.rate is not None and port.rate < fastest:
            results.append(_slow(port, port.rate, fastest))
    if results:
        return results
    return [passed(NAME, f"{len(used)} ports active: " + ", ".join(f"{p.name} {p.rate or 0:g} Gbit/s" for p in used))]


def _slow(port: Port, rate: float, fastest: float) -> Result:
    return Result(
        name=NAME,
        status=Status.SLOW,
        line=f"{port.name} runs at {rate:g} Gbit/s, another port of this node at {fastest:g}",
        remedy="check cable and transceiver: a link with too many errors falls back to a lower rate or fewer lanes",
        subject=port.name,
        figure=rate,
        unit="Gbit/s",
        limit=fastest,
    )


def judge_errors(before: Sequence[Port], after: Sequence[Port], duration_s: float, limits: Limits) -> list[Result]:
    old = {port.name: port.counters for port in before}
    grown = {
        (port.name, counter): count - old[port.name].get(counter, count)
        for port in after
        if port.name in old
        for counter, count in port.counters.items()
    }
    return judge_growth(ERRORS, grown, duration_s, limits, once=_ONCE)


def _word(path: Path) -> str:
    """Return the word in ``4: ACTIVE``."""
    return (read_text(path) or "").rpartition(":")[2].strip().lower()


def _rate(path: Path) -> float | None:
    try:
        return float((read_text(path) or "").split()[0])
    except (IndexError, ValueError):
        return None
