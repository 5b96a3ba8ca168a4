"""Whether the disk of a directory has space, gives back what it was given, and is honest about what is durable."""

from __future__ import annotations

import os
import secrets
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from resilient.check.context import Context, read_text
from resilient.check.limits import GIB, MIB, Limits
from resilient.check.result import Result, Status, at_least, failed
from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.format import sizes
from resilient.format.digest import digest

Medium: TypeAlias = Literal["rotating", "flash", "virtual", "memory", "network", "unknown"]

NAME: Final = "disk"
SPACE: Final = "disk space"
FLUSH: Final = "disk flush"

_BLOCK_NBYTES: Final = 8 * MIB
_SMALL: Final = b"\0" * 4096
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
_NETWORK: Final = frozenset({"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "virtiofs"})
_REMEDY: Final = "see the kernel log for errors of the device, and have it replaced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """How fast a file was written (and flushed) and read, in bytes a second, and whether it was the same."""

    write_rate: float
    read_rate: float
    same: bool


def check(context: Context) -> list[Result]:
    """Look at the disk of each directory among the places; without any, at that of temporary files."""
    return [result for folder in context.folders for result in _of_folder(folder, context)]


def _of_folder(folder: Path, context: Context) -> list[Result]:
    subject = str(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        state = os.statvfs(folder)
        free = state.f_bavail * state.f_frsize
        results = [judge_space(free, state.f_blocks * state.f_frsize, context.limits, subject=subject)]
        nbytes = min(int(context.chosen(64, 512)) * MIB, free // 4)
        with tempfile.TemporaryDirectory(prefix=".resilient-check-", dir=folder) as inside:
            results.append(judge_written(measure(Path(inside), nbytes), context.limits, subject=subject))
            latency_s = flush_latency_s(Path(inside), int(context.chosen(30, 100)))
        medium = medium_of(folder, context)
        return [*results, judge_flush(latency_s, medium, context.limits, subject=subject)]
    except OSError as error:
        remedy = "check that it is mounted, writable and not full; see the kernel log for errors of the device"
        return [failed(NAME, f"{folder} cannot be used: {error.strerror or error}", remedy, subject=subject)]


def judge_space(free: int, total: int, limits: Limits, *, subject: str = "") -> Result:
    enough = free >= limits.free_nbytes
    line = f"{sizes.in_words(free)} of {sizes.in_words(total)} are free"
    return Result(
        name=SPACE,
        status=Status.OK if enough else Status.FAILED,
        line=line if enough else f"only {line}",
        remedy="" if enough else "remove files, or choose another place",
        subject=subject,
        figure=free / GIB,
        unit="GiB",
        limit=limits.free_nbytes / GIB,
    )


def measure(folder: Path, nbytes: int, clock: Clock = SYSTEM_CLOCK) -> Written:
    """Write a file, flush it, have the kernel forget it, and read it back.

    Raises:
        OSError: the disk refuses.
    """
    block = secrets.token_bytes(_BLOCK_NBYTES)
    times = max(1, nbytes // _BLOCK_NBYTES)
    file = os.open(folder / "written", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        start = clock.monotonic()
        for _ in range(times):
            _write(file, block)
        os.fsync(file)
        written = clock.monotonic()
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # else memory is read, not the disk
        os.lseek(file, 0, os.SEEK_SET)
        wanted, same = digest(block), True
        begun = clock.monotonic()
        for _ in range(times):
            same &= digest(_read(file, _BLOCK_NBYTES)) == wanted
        read = clock.monotonic()
    finally:
        os.close(file)
    nbytes = times * _BLOCK_NBYTES
    return Written(write_rate=nbytes / (written - start), read_rate=nbytes / (read - begun), same=same)


def _write(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def _read(file: int, nbytes: int) -> bytes:
    parts = []
    while nbytes and (part := os.read(file, nbytes)):
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


def judge_written(written: Written, limits: Limits, *, subject: str = "") -> Result:
    if not written.same:
        return failed(NAME, "what was read back is not what was written", _REMEDY, subject=subject)
    result = Result(
        name=NAME,
        status=Status.OK,
        line=f"writes with a flush; reads {written.read_rate / MIB:,.0f} MiB/s",
        subject=subject,
        figure=written.write_rate / MIB,
        unit="MiB/s",
        limit=limits.disk_rate / MIB,
    )
    return at_least(
        result,
        slow_line=f"writes only {written.write_rate / MIB:.1f} MiB/s",
        remedy="look for another program that writes there, a degraded array, a worn or throttled disk",
    )


def flush_latency_s(
    folder: Path, times: int, *, flush: Callable[[int], None] = os.fsync, clock: Clock = SYSTEM_CLOCK
) -> float:
    """Return the median time of flushing 4 KiB that were just written; ``flush`` is what makes a file durable."""
    file = os.open(folder / "flushed", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    taken = []
    try:
        for index in range(times):
            os.pwrite(file, _SMALL, index * len(_SMALL))
            start = clock.monotonic()
            flush(file)
            taken.append(clock.monotonic() - start)
    finally:
        os.close(file)
    return statistics.median(taken)


def medium_of(folder: Path, context: Context) -> Medium:
    """Return on what the files of a directory lie, as far as Linux tells.

    A disk of a virtual machine says that it turns because it does not know better: it counts as virtual.
    """
    kind = _file_system(folder, context)
    if kind in _IN_MEMORY:
        return "memory"
    if kind in _NETWORK or kind.startswith("fuse"):
        return "network"
    device = folder.stat().st_dev
    block = context.path("sys/dev/block", f"{os.major(device)}:{os.minor(device)}").resolve()
    disk = block.parent if (block / "partition").exists() else block
    rotates = read_text(disk / "queue" / "rotational")
    if disk.name.startswith(("vd", "xvd")):
        return "virtual"
    return {"1": "rotating", "0": "flash"}.get(rotates or "", "unknown")  # type: ignore[return-value]  # one of the two


def _file_system(folder: Path, context: Context) -> str:
    """Return the type of the file system, of the mount point that is nearest above."""
    best, kind = -1, ""
    there = folder.resolve()
    for line in (read_text(context.path("proc/self/mounts")) or "").splitlines():
        _, mount, found, *_ = line.split(" ")
        point = Path(mount.replace("\\040", " "))
        if (there == point or point in there.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), found
    return kind


def judge_flush(latency_s: float, medium: Medium, limits: Limits, *, subject: str = "") -> Result:
    """Judge how honest a flush is, as far as its time tells: none can be faster than its medium.

    A disk with a cache that a battery keeps is honest and fast; on a rotating one it is taken for a lie unless the
    limit is lowered. That a slow flush is honest cannot be told from here.
    """
    if medium == "memory":
        line = "the files are in memory: they survive a killed process, and no restart of the machine"
        return Result(name=FLUSH, status=Status.OK, line=line, subject=subject)
    limit_s = limits.flush_rotating_s if medium == "rotating" else limits.flush_s
    lies = latency_s < limit_s
    line = f"a flush takes {latency_s * 1e6:,.0f} us ({medium} medium)"
    return Result(
        name=FLUSH,
        status=Status.FAILED if lies else Status.OK,
        line=f"{line}: nothing can have reached it, so a loss of power loses what was said to be saved"
        if lies
        else line,
        remedy="look for an ignored flush: eatmydata, nobarrier, cache=unsafe of the virtual machine, a volatile cache"
        if lies
        else "",
        subject=subject,
        figure=latency_s * 1e6,
        unit="us",
        limit=limit_s * 1e6,
    )
