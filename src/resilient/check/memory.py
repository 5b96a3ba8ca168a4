"""Whether memory is there, keeps what it is given, and is as fast as memory is."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from resilient.check.context import Context, read_number, read_text
from resilient.check.limits import GIB, MIB, Limits
from resilient.check.result import Result, Status, at_least, failed, passed, skipped
from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.format import sizes

Words = npt.NDArray[np.uint64]

NAME: Final = "memory"
BANDWIDTH: Final = "memory bandwidth"
PATTERNS: Final = "memory patterns"
ERRORS: Final = "memory errors"

_COPY_NBYTES: Final = 64 * MIB
_BLOCK_NBYTES: Final = 16 * MIB
_MOST_NBYTES: Final = 2 * GIB
_FIXED: Final = (0x0, 0xFFFF_FFFF_FFFF_FFFF, 0xAAAA_AAAA_AAAA_AAAA, 0x5555_5555_5555_5555)


def check(context: Context) -> list[Result]:
    """Look at the size, copy for bandwidth; full: write patterns over up to 2 GiB, and read them back."""
    available, total = available_nbytes(context)
    results = [judge_size(available, total, context.limits), judge_errors(error_counts(context))]
    if available > 4 * _COPY_NBYTES:
        results.append(judge_bandwidth(copy_rate(int(context.chosen(6, 20))), context.limits))
    if context.full:
        nbytes = min(_MOST_NBYTES, available // 4) // _BLOCK_NBYTES * _BLOCK_NBYTES
        results.append(judge_patterns(wrong_words(nbytes), nbytes))
    return results


def available_nbytes(context: Context) -> tuple[int, int]:
    """Return what may still be taken, and what there is at all: of the machine, or of this container if less."""
    lines = (read_text(context.path("proc/meminfo")) or "").splitlines()
    sizes_kib = {line.partition(":")[0]: int(line.split()[1]) for line in lines if len(line.split()) > 1}
    total, available = sizes_kib.get("MemTotal", 0) << 10, sizes_kib.get("MemAvailable", 0) << 10
    limit = read_number(context.path("sys/fs/cgroup/memory.max"))  # "max" where there is none
    if limit is not None and limit < total:
        used = read_number(context.path("sys/fs/cgroup/memory.current")) or 0
        total, available = limit, min(available, limit - used)
    return available, total


def judge_size(available: int, total: int, limits: Limits) -> Result:
    line = f"{sizes.in_words(available)} of {sizes.in_words(total)} are free"
    if available >= limits.available_nbytes:
        return Result(name=NAME, status=Status.OK, line=line, figure=total / GIB, unit="GiB")
    return Result(
        name=NAME,
        status=Status.FAILED,
        line=f"only {line}",
        remedy="end what holds it: processes of an earlier attempt, files in /dev/shm; or raise the container's limit",
        figure=available / GIB,
        unit="GiB",
        limit=limits.available_nbytes / GIB,
    )


def error_counts(context: Context) -> dict[str, tuple[int, int]] | None:
    """Return uncorrected and corrected errors since the start, by memory controller (Linux's EDAC); None without it."""
    controllers = sorted(context.path("sys/devices/system/edac/mc").glob("mc[0-9]*"))
    counts = {mc.name: (read_number(mc / "ue_count"), read_number(mc / "ce_count")) for mc in controllers}
    return {name: (ue or 0, ce or 0) for name, (ue, ce) in counts.items()} or None


def judge_errors(counts: dict[str, tuple[int, int]] | None) -> Result:
    if counts is None:
        return skipped(ERRORS, "this system counts none (no EDAC driver)")
    for name, (uncorrected, _) in counts.items():
        if uncorrected:
            return failed(
                ERRORS,
                f"the memory controller {name} has counted {uncorrected} errors that it could not correct",
                "take this node out and have its memory modules replaced",
                subject=name,
            )
    return passed(
        ERRORS, f"none uncorrected, {sum(ce for _, ce in counts.values())} corrected since the machine's start"
    )


def copy_rate(times: int, clock: Clock = SYSTEM_CLOCK) -> float:
    """Return the bytes a second of the fastest of several copies by one thread."""
    source: Words = np.ones(_COPY_NBYTES // 8, dtype=np.uint64)
    into = np.ones_like(source)  # touched: else the kernel's finding pages is measured
    best_s = float("inf")
    for _ in range(times):
        start = clock.monotonic()
        np.copyto(into, source)
        best_s = min(best_s, clock.monotonic() - start)
    return _COPY_NBYTES / best_s


def judge_bandwidth(rate: float, limits: Limits) -> Result:
    result = Result(
        name=BANDWIDTH,
        status=Status.OK,
        line="one thread copies",
        figure=rate / GIB,
        unit="GiB/s",
        limit=limits.copy_rate / GIB,
    )
    return at_least(
        result,
        slow_line=f"one thread copies only {rate / GIB:.2f} GiB/s",
        remedy="look for a memory channel that is missing or degraded (dmidecode -t memory), and for swapping",
    )


def wrong_words(nbytes: int, touch: Callable[[Words], None] | None = None) -> int:
    """Return how many words of so much memory did not keep what was written to them.

    Four fixed patterns and each word's own place. ``touch`` is for tests: it sees the memory between write and read.
    """
    if not nbytes:
        return 0
    with mmap.mmap(-1, nbytes) as memory:
        words: Words = np.frombuffer(memory, dtype=np.uint64)
        blocks = np.array_split(words, max(1, nbytes // _BLOCK_NBYTES))
        wrong = sum(_wrong(words, blocks, pattern, touch) for pattern in (*_FIXED, None))
        del words, blocks  # the mapping cannot be closed while somebody looks at it
    return wrong


def _wrong(words: Words, blocks: list[Words], pattern: int | None, touch: Callable[[Words], None] | None) -> int:
    place: Words = np.arange(max(map(len, blocks)), dtype=np.uint64)
    for index, block in enumerate(blocks):
        block[:] = np.uint64(pattern) if pattern is not None else place[: len(block)] + np.uint64(index << 40)
    if touch is not None:
        touch(words)
    wrong = 0
    for index, block in enumerate(blocks):
        wanted = np.uint64(pattern) if pattern is not None else place[: len(block)] + np.uint64(index << 40)
        wrong += int(np.count_nonzero(block != wanted))
    return wrong


def judge_patterns(wrong: int, nbytes: int) -> Result:
    if wrong:
        return failed(
            PATTERNS,
            f"{wrong} words of {sizes.in_words(nbytes)} did not keep what was written to them",
            "take this node out and have its memory replaced: what it trains or saves is wrong, too",
        )
    return (
        passed(PATTERNS, f"{sizes.in_words(nbytes)} keep five patterns") if nbytes else skipped(PATTERNS, "no memory")
    )
