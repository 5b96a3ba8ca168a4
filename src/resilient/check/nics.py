"""Whether network cards have their link, at the speed of their like, without errors that grow.

``operstate``, ``carrier``, ``flags``, ``speed`` (Mbit/s), ``carrier_changes`` and ``statistics/`` of
``/sys/class/net``; Documentation/ABI/testing/sysfs-class-net.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from resilient.check.context import Context, read_number, read_text
from resilient.check.limits import Limits
from resilient.check.result import Result, Status, failed, passed, skipped
from resilient.clock import SYSTEM_CLOCK, Clock

NAME: Final = "network link"
ERRORS: Final = "network errors"

_UP: Final = 0x1  # IFF_UP: somebody wants it to work
COUNTERS: Final = ("rx_errors", "tx_errors", "rx_crc_errors", "rx_frame_errors", "carrier_changes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A physical interface. ``like`` names its model; ``speed`` is Mbit/s, None where the driver does not say."""

    name: str
    like: str
    wanted: bool
    carrier: bool
    speed: int | None
    counters: Mapping[str, int]


def check(context: Context) -> list[Result]:
    """Read twice, with a while between: errors of long ago are no fault of now."""
    return watched(context, SYSTEM_CLOCK)


def watched(context: Context, clock: Clock) -> list[Result]:
    before, start = read(context), clock.monotonic()
    clock.sleep(context.chosen(1.0, 5.0))
    after, duration_s = read(context), clock.monotonic() - start
    return [*judge(after), *judge_errors(before, after, duration_s, context.limits)]


def read(context: Context) -> list[Nic]:
    """Return the interfaces that have a device: not the loopback, bridges, tunnels, those of containers."""
    found = []
    for folder in sorted(context.path("sys/class/net").glob("*")):
        if not (folder / "device").exists():
            continue
        counters = {name: read_number(folder / "statistics" / name) or 0 for name in COUNTERS[:-1]}
        counters["carrier_changes"] = read_number(folder / "carrier_changes") or 0
        speed = read_number(folder / "speed")
        found.append(
            Nic(
                name=folder.name,
                like=f"{read_text(folder / 'device/vendor')}:{read_text(folder / 'device/device')}",
                wanted=bool((read_number(folder / "flags") or 0) & _UP),
                carrier=read_text(folder / "carrier") == "1" and read_text(folder / "operstate") != "down",
                speed=speed if speed is not None and speed > 0 else None,
                counters=counters,
            )
        )
    return found


def judge(nics: Sequence[Nic]) -> list[Result]:
    """Return a line for each bad one, or one for all. One that is switched off is nobody's fault."""
    used = [nic for nic in nics if nic.wanted]
    if not used:
        return [skipped(NAME, "no physical network card is switched on here (a container has none)")]
    results = [
        failed(
            NAME,
            f"{nic.name} has no link",
            f"check its cable or transceiver and the switch's port; if nobody needs it: ip link set {nic.name} down",
            subject=nic.name,
        )
        for nic in used
        if not nic.carrier
    ]
    for nic in used:
        fastest = max((other.speed or 0 for other in used if other.like == nic.like), default=0)
        if nic.carrier and nic.speed is not None and nic.speed < fastest:
            results.append(_slow(nic, nic.speed, fastest))
    if results:
        return results
    speeds = ", ".join(f"{nic.name} {nic.speed / 1000:g} Gbit/s" if nic.speed else nic.name for nic in used)
    return [passed(NAME, f"up: {speeds}")]


def _slow(nic: Nic, speed: int, fastest: int) -> Result:
    return Result(
        name=NAME,
        status=Status.SLOW,
        line=f"{nic.name} runs at {speed / 1000:g} Gbit/s, a card of the same model here at {fastest / 1000:g}",
        remedy="check cable, transceiver and the setting of the switch's port",
        subject=nic.name,
        figure=speed / 1000,
        unit="Gbit/s",
        limit=fastest / 1000,
    )


def judge_errors(before: Sequence[Nic], after: Sequence[Nic], duration_s: float, limits: Limits) -> list[Result]:
    """Judge by how much the counters have grown in ``duration_s``."""
    old = {nic.name: nic.counters for nic in before}
    grown = {
        (nic.name, counter): count - old[nic.name][counter]
        for nic in after
        if nic.name in old
        for counter, count in nic.counters.items()
    }
    return judge_growth(ERRORS, grown, duration_s, limits)


def judge_growth(
    name: str,
    grown: Mapping[tuple[str, str], int],
    duration_s: float,
    limits: Limits,
    *,
    once: Sequence[str] = ("carrier_changes",),
) -> list[Result]:
    """Return a line for each counter, by (device, counter), that grows too fast; for one of ``once``, that grows."""
    results = []
    for (device, counter), count in grown.items():
        rate = count / duration_s
        limit = 0.0 if counter in once else limits.link_errors_per_s
        if rate > limit:
            results.append(
                Result(
                    name=name,
                    status=Status.FAILED,
                    line=f"{counter} of {device} grew by {count} in {duration_s:.0f} s",
                    remedy="check cable, transceiver and the switch's port: the link loses what is sent",
                    subject=device,
                    figure=rate,
                    unit="/s",
                    limit=limit,
                )
            )
    if results:
        return results
    return [passed(name, f"none grew in {duration_s:.0f} s")] if grown else [skipped(name, "no counters here")]
