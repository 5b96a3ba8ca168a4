"""Numbers that the kernel shows in small files, which stay open: bytes of links, and how busy processors are.

``/proc/stat`` (proc(5)); ``/sys/class/net/*/statistics`` and ``speed`` in Mbit/s (Documentation/ABI/testing/
sysfs-class-net); ``/sys/class/infiniband/*/ports/*/counters/port_xmit_data`` in units of four bytes, and ``rate``
(Documentation/ABI/stable/sysfs-class-infiniband). Traffic of RDMA does not show in the counters of the network card.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

LOOPBACK: Final = "lo"
_UP: Final = 0x1
_WORD_NBYTES: Final = 4
_MOST_NBYTES: Final = 512


class File:
    """A file that is read again and again from its start."""

    def __init__(self, path: Path) -> None:
        """Open it; raises OSError."""
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> bytes:
        """Return how it begins; empty if the kernel has nothing to tell any more."""
        try:
            return os.pread(self._file, _MOST_NBYTES, 0)
        except OSError:
            return b""

    def close(self) -> None:
        os.close(self._file)


class Traffic(NamedTuple):
    """Bytes that a link has sent and received since it came up; None where that cannot be read."""

    sent: int | None
    received: int | None


class Link:
    """One link: a network card, a port of InfiniBand or RoCE, or the loopback.

    ``capable``: bytes a second that it can send, as its driver says; None if that does not.
    """

    def __init__(self, name: str, sent: Path, received: Path, *, unit: int = 1, capable: float | None) -> None:
        """Open its counters; raises OSError."""
        self.name = name
        self.capable = capable
        self._unit = unit
        self._sent = File(sent)
        try:
            self._received = File(received)
        except OSError:
            self._sent.close()
            raise

    def read(self) -> tuple[bytes, bytes]:
        """Return what its counters say, for `traffic`."""
        return self._sent.read(), self._received.read()

    def traffic(self, read: tuple[bytes, bytes]) -> Traffic:
        """Return what has been read as numbers."""
        sent, received = (int(text) * self._unit if text.strip().isdigit() else None for text in read)
        return Traffic(sent, received)

    def close(self) -> None:
        self._sent.close()
        self._received.close()


class Processors:
    """How much of all processors is in use."""

    def __init__(self, root: Path) -> None:
        """Open what tells; raises OSError."""
        self._stat = File(root / "proc/stat")
        self._before: tuple[int, int] | None = None

    def read(self) -> bytes:
        """Return what the kernel says, for `busy`."""
        return self._stat.read()

    def busy(self, read: bytes) -> float | None:
        """Return the share, 0 to 1, since what was read before; None the first time, or if no tick has passed."""
        ticks = [int(word) for word in read.partition(b"\n")[0].split()[1:9] if word.isdigit()]
        if len(ticks) < 5:
            return None
        now = sum(ticks), ticks[3] + ticks[4]  # idle, and waiting for a disk
        before, self._before = self._before, now
        if before is None or now[0] <= before[0]:
            return None
        return min(1.0, max(0.0, 1.0 - (now[1] - before[1]) / (now[0] - before[0])))

    def close(self) -> None:
        self._stat.close()


def open_links(root: Path) -> list[Link]:
    """Return the links that lead out of this machine, and after them the loopback.

    Those are the network cards that are switched on and the ports of RDMA. A container has no card but an end of a pair
    of virtual ones: where there is no card, whatever is switched on counts.
    """
    folders = [each for each in sorted((root / "sys/class/net").glob("*")) if _flags(each) & _UP]
    outside = [each for each in folders if each.name != LOOPBACK]
    cards = [each for each in outside if (each / "device").exists()] or outside
    found: list[Link] = []
    for folder in [*cards, *(each for each in folders if each.name == LOOPBACK)]:
        if folder.name == LOOPBACK:
            found += _ports(root)
        speed = _first_number(folder / "speed")
        counters = folder / "statistics"
        with suppress(OSError):
            found.append(
                Link(
                    folder.name,
                    counters / "tx_bytes",
                    counters / "rx_bytes",
                    capable=speed * 1e6 / 8 if speed is not None and speed > 0 else None,
                )
            )
    return found


def _ports(root: Path) -> list[Link]:
    found = []
    for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        rate = _first_number(folder / "rate")
        with suppress(OSError):
            found.append(
                Link(
                    f"{folder.parent.parent.name}/{folder.name}",
                    folder / "counters/port_xmit_data",
                    folder / "counters/port_rcv_data",
                    unit=_WORD_NBYTES,
                    capable=rate * 1e9 / 8 if rate else None,
                )
            )
    return found


def _flags(folder: Path) -> int:
    try:
        return int((folder / "flags").read_text(), 16)
    except (OSError, ValueError):
        return 0


def _first_number(path: Path) -> float | None:
    try:
        return float(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def total(rates: Sequence[float]) -> float:
    """Return a sum that is NaN where there is nothing to sum up."""
    return sum(rates) if rates else float("nan")
