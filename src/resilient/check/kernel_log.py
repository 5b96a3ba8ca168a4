"""What the kernel's log says about devices of NVIDIA (XID), and what each number means for the node."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from resilient.check.context import Context, read_text
from resilient.check.limits import Limits
from resilient.check.result import Result, failed, passed, skipped

NAME: Final = "kernel log"

_TIMEOUT_S: Final = 10.0
_XID: Final = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<device>[0-9a-fA-F:.]+)\): (?P<number>\d+),? *(?P<text>.*)")
_KMSG: Final = re.compile(r"\d+,\d+,(?P<us>\d+),[^;]*;(?P<text>.*)")  # Documentation/ABI/testing/dev-kmsg
_DMESG: Final = re.compile(r"\[ *(?P<s>\d+\.\d+)\] (?:\S+ kernel: )?(?P<text>.*)")  # also journalctl -o short-monotonic


class Group(StrEnum):
    """Whom a number accuses."""

    APPLICATION = "application"
    DRIVER = "driver"
    HARDWARE = "hardware"


_MEANS: Final = {
    Group.APPLICATION: "a fault of the program, on its own no fault of the node",
    Group.DRIVER: "the device or its driver needs a reset",
    Group.HARDWARE: "the device, its memory or its link is faulty",
}

XIDS: Final[dict[int, tuple[Group, str]]] = {
    13: (Group.APPLICATION, "exception of the graphics engine"),
    31: (Group.APPLICATION, "access to an invalid address"),
    43: (Group.APPLICATION, "the device stopped working on a program"),
    45: (Group.APPLICATION, "work was ended early, as after another error or a kill"),
    62: (Group.DRIVER, "the internal micro-controller halted"),
    63: (Group.DRIVER, "a row of memory is to be remapped, or a page retired"),
    68: (Group.DRIVER, "exception of the video processor"),
    69: (Group.DRIVER, "exception of the graphics engine's class"),
    94: (Group.DRIVER, "an uncorrectable memory error that was contained"),
    119: (Group.DRIVER, "the device's system processor (GSP) does not answer"),
    120: (Group.DRIVER, "error of the device's system processor (GSP)"),
    121: (Group.DRIVER, "error of the link between chips (C2C), corrected"),
    154: (Group.DRIVER, "the driver asks for a recovery action"),
    48: (Group.HARDWARE, "uncorrectable memory error (double bit)"),
    54: (Group.HARDWARE, "auxiliary power is not connected"),
    56: (Group.HARDWARE, "error of the display engine"),
    57: (Group.HARDWARE, "error of the display link"),
    58: (Group.HARDWARE, "memory interface is unstable"),
    64: (Group.HARDWARE, "a row of memory could not be remapped, or a page not retired"),
    65: (Group.HARDWARE, "exception of the video processor's hardware"),
    73: (Group.HARDWARE, "error of the video encoder"),
    74: (Group.HARDWARE, "error of NVLink"),
    79: (Group.HARDWARE, "the device has fallen off the bus"),
    80: (Group.HARDWARE, "corrupted data sent to the device"),
    81: (Group.HARDWARE, "error of the VGA subsystem"),
    92: (Group.HARDWARE, "high rate of corrected memory errors"),
    95: (Group.HARDWARE, "an uncorrectable memory error that was not contained"),
    110: (Group.HARDWARE, "security fault"),
    122: (Group.HARDWARE, "the device's flash memory cannot be read (SPI)"),
    123: (Group.HARDWARE, "the device's flash memory cannot be written (SPI)"),
    140: (Group.HARDWARE, "unrecovered memory error"),
    **dict.fromkeys(range(144, 151), (Group.HARDWARE, "error of NVLink 5")),
}
"""Numbers as in NVIDIA's XID catalog. The grouping: application where Meta's gcm names the user's program among the
causes; hardware where Azure's node health check (ND H100 v5) or imbue's list takes the node out; the rest, which those
lists or the catalog answer with a reset, is the driver's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """One message; ``at_s`` counts from the machine's start."""

    number: int
    device: str
    text: str
    at_s: float


def check(context: Context) -> list[Result]:
    lines = read(context)
    uptime = (read_text(context.path("proc/uptime")) or "").split()
    if lines is None or not uptime:
        return [skipped(NAME, "may not be read here (needs root or the group adm; containers often show none)")]
    return judge(parse(lines), float(uptime[0]), context.limits)


def read(context: Context) -> list[str] | None:
    """Return the lines of the log since the machine's start, as far as kept; None if it may not be read."""
    try:
        return _records(context)
    except OSError:
        pass  # not for everybody; the programs may know another way
    for command in (["dmesg"], ["journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager"]):
        if (program := shutil.which(command[0])) is None:
            continue
        try:
            done = subprocess.run(  # noqa: S603 -- no shell, fixed words
                [program, *command[1:]],
                capture_output=True,
                text=True,
                errors="replace",
                check=True,
                timeout=_TIMEOUT_S,
            )
        except subprocess.SubprocessError:
            continue
        return done.stdout.splitlines()
    return None


def _records(context: Context) -> list[str]:
    """Return what ``/dev/kmsg`` holds: each read is one record; it never ends, so it must not block."""
    file = os.open(context.path("dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    lines: list[str] = []
    try:
        while record := os.read(file, 8192):
            lines += record.decode(errors="replace").splitlines()
    except BlockingIOError:
        pass  # that was the newest
    except BrokenPipeError:
        pass  # what comes next was overwritten meanwhile: so much is being logged that the rest is newer than this look
    finally:
        os.close(file)
    return lines


def parse(lines: Iterable[str]) -> list[Xid]:
    """Return the XIDs in lines of ``/dev/kmsg``, of ``dmesg``, or of ``journalctl -k -o short-monotonic``."""
    found = []
    for line in lines:
        if (kmsg := _KMSG.fullmatch(line)) is not None:
            at_s, text = int(kmsg["us"]) / 1e6, kmsg["text"]
        elif (dmesg := _DMESG.fullmatch(line)) is not None:
            at_s, text = float(dmesg["s"]), dmesg["text"]
        else:
            continue
        if (xid := _XID.search(text)) is not None:
            found.append(Xid(number=int(xid["number"]), device=xid["device"], text=xid["text"].strip(), at_s=at_s))
    return found


def judge(xids: Iterable[Xid], now_s: float, limits: Limits) -> list[Result]:
    """Return a line for each number and device that accuses the node and is not too old (``now_s`` since the start)."""
    recent = {(xid.number, xid.device): xid for xid in xids if now_s - xid.at_s <= limits.xid_age_s}
    results, mild = [], []
    for (number, device), xid in sorted(recent.items()):
        group, meaning = XIDS.get(number, (None, "not in the table of this version"))
        what = f"XID {number} of {device} {(now_s - xid.at_s) / 60:.0f} min ago: {meaning}"
        if group in {Group.HARDWARE, Group.DRIVER}:
            remedy = (
                "take this node out and have the device looked at"
                if group is Group.HARDWARE
                else "reset the device (nvidia-smi -r) or restart the machine; if it comes back, have it replaced"
            )
            results.append(failed(NAME, f"{what} ({_MEANS[group]})", remedy, subject=device))
        else:
            mild.append(f"XID {number}: {_MEANS[group] if group else meaning}")
    if results:
        return results
    return [passed(NAME, "; ".join(dict.fromkeys(mild)) or f"no XID in the last {limits.xid_age_s / 3600:g} h")]
