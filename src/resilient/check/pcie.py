"""Whether PCIe devices use the width and speed that they, and the port that they are in, are capable of.

Linux shows both for each device: ``current_link_width``, ``max_link_width`` (lanes) and ``current_link_speed``,
``max_link_speed`` (such as ``16.0 GT/s PCIe``); Documentation/ABI/testing/sysfs-bus-pci.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from resilient.check.context import Context, read_number, read_text
from resilient.check.result import Result, Status, passed, skipped

NAME: Final = "PCIe link"

_KINDS: Final = {
    0x0300: "GPU",
    0x0302: "GPU",
    0x1200: "accelerator",
    0x0200: "network card",
    0x0207: "InfiniBand card",
    0x0108: "NVMe disk",
}
"""The first two bytes of a device's class, for what training uses."""

_SAVING: Final = frozenset({"GPU", "accelerator"})
"""They lower the speed of their link when idle, and raise it for work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A device's link: lanes, and GT/s of each lane; what it can do is what both of its ends can."""

    address: str
    kind: str
    width: int
    max_width: int
    speed: float
    max_speed: float


def check(context: Context) -> list[Result]:
    return judge(read_links(context), loaded=False)


def read_links(context: Context) -> list[Link]:
    """Return the links of the devices that training uses; those of virtual machines often show none."""
    found = []
    for device in sorted(context.path("sys/bus/pci/devices").glob("*")):
        kind = _KINDS.get((read_number(device / "class") or 0) >> 8)
        width, max_width = read_number(device / "current_link_width"), read_number(device / "max_link_width")
        speed, max_speed = _speed(device / "current_link_speed"), _speed(device / "max_link_speed")
        if kind is None or not max_width or width is None or speed is None or max_speed is None:
            continue
        port = device.resolve().parent
        port_width, port_speed = read_number(port / "max_link_width"), _speed(port / "max_link_speed")
        found.append(
            Link(
                address=device.name,
                kind=kind,
                width=width,
                max_width=min(max_width, port_width or max_width),
                speed=speed,
                max_speed=min(max_speed, port_speed or max_speed),
            )
        )
    return found


def judge(links: list[Link], *, loaded: bool) -> list[Result]:
    """Return a line for each bad link, or one for all. ``loaded``: the accelerators are at work."""
    if not links:
        return [skipped(NAME, "no device of training shows one (as in most virtual machines)")]
    bad = [
        _bad(link)
        for link in links
        if link.width < link.max_width or (link.speed < link.max_speed and _counts(link, loaded))
    ]
    if bad:
        return bad
    kinds = sorted({link.kind for link in links})
    return [passed(NAME, f"{len(links)} devices ({', '.join(kinds)}) have all that they and their ports can do")]


def _counts(link: Link, loaded: bool) -> bool:  # noqa: FBT001 -- as in judge
    return loaded or link.kind not in _SAVING


def _bad(link: Link) -> Result:
    narrow = link.width < link.max_width
    what = f"x{link.width} of x{link.max_width}" if narrow else f"{link.speed:g} of {link.max_speed:g} GT/s"
    return Result(
        name=NAME,
        status=Status.FAILED,
        line=f"the {link.kind} at {link.address} runs at {what}",
        remedy="reseat the card or its riser, look for corrected errors (aer_dev_correctable); then have it replaced",
        subject=link.address,
        figure=link.width if narrow else link.speed,
        unit="lanes" if narrow else "GT/s",
        limit=link.max_width if narrow else link.max_speed,
    )


def _speed(path: Path) -> float | None:
    text = read_text(path)
    try:
        return float((text or "").split()[0])
    except (IndexError, ValueError):
        return None  # "Unknown" where the link is down
