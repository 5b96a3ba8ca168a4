"""Whether every core computes right, and none is much slower than the others.

The work is made of additions, multiplications, divisions and square roots of float64, which IEEE 754 rounds exactly,
and of integers modulo 2^64: its result is the same bits on every processor, so the reference is a constant.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from resilient.check.context import Context
from resilient.check.limits import Limits
from resilient.check.result import Result, Status, failed, skipped
from resilient.clock import SYSTEM_CLOCK, Clock, Deadline
from resilient.format.digest import digest

NAME: Final = "processor"

REFERENCE: Final = "99ab05a2087633e27add811e69d15d74"
"""Digest of what `work` returns."""

_LENGTH: Final = 32768  # 256 KiB: stays in the cache of its core, so that it is the core that is measured
_ROUNDS: Final = 8
_AT_ONCE: Final = 16  # threads share one interpreter
_OPERATIONS: Final = _LENGTH * _ROUNDS * 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """What one core did: wrong results of how many, and the shortest time for one."""

    wrong: int
    done: int
    best_s: float


def work() -> bytes:
    """Compute something; return it as bytes."""
    x: npt.NDArray[np.float64] = np.arange(1, _LENGTH + 1, dtype=np.float64)
    n = np.arange(1, _LENGTH + 1, dtype=np.uint64)
    for _ in range(_ROUNDS):
        x = np.sqrt(x * x * 0.75 + 1.25) / (1.0 + x * 0.001953125)
        n ^= n << np.uint64(13)
        n ^= n >> np.uint64(7)
        n *= np.uint64(0x9E3779B97F4A7C15)
    return x.tobytes() + n.tobytes()


def check(context: Context) -> list[Result]:
    """Let each core work for some tenths of a second (full: for seconds)."""
    try:
        cores = sorted(os.sched_getaffinity(0))
    except AttributeError:
        return [skipped(NAME, "this system cannot bind a thread to a core")]
    waves = [cores[start : start + _AT_ONCE] for start in range(0, len(cores), _AT_ONCE)]
    each_s = min(context.chosen(0.6, 3.0), context.chosen(5.0, 30.0) / len(waves))
    found: dict[int, Core] = {}
    for wave in waves:
        found |= measure(wave, each_s)
    return judge(found, context.limits)


def measure(cores: list[int], duration_s: float, clock: Clock = SYSTEM_CLOCK) -> dict[int, Core]:
    """Return what each core did in ``duration_s``; all of them work at the same time.

    Raises:
        OSError: a thread may not be bound to its core.
    """
    found: dict[int, Core] = {}
    errors: list[OSError] = []

    def run(core: int) -> None:
        try:
            os.sched_setaffinity(0, {core})  # of this thread alone
        except OSError as error:
            errors.append(error)
            return
        wrong, done, best_s = 0, 0, float("inf")
        deadline = Deadline(clock, duration_s)
        while not deadline.expired or done < 2:
            start = clock.monotonic()
            result = work()
            best_s = min(best_s, clock.monotonic() - start)
            wrong += digest(result).hex() != REFERENCE
            done += 1
        found[core] = Core(wrong=wrong, done=done, best_s=best_s)

    threads = [threading.Thread(target=run, args=(core,), daemon=True) for core in cores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # the whole check has a deadline, which ends its process
    if errors:
        raise errors[0]
    return found


def judge(cores: Mapping[int, Core], limits: Limits) -> list[Result]:
    """Return one line for what is wrong with each bad core, or one for all of them."""
    bad = [
        failed(
            NAME,
            f"core {core} computed a wrong result in {each.wrong} of {each.done} tries",
            "take this node out and have the processor replaced: what it trains is wrong, too",
            subject=f"core {core}",
        )
        for core, each in sorted(cores.items())
        if each.wrong
    ]
    speeds = {core: _OPERATIONS / each.best_s / 1e9 for core, each in cores.items()}
    usual = statistics.median(speeds.values())
    limit = usual * limits.core_ratio
    slow = [
        Result(
            name=NAME,
            status=Status.SLOW,
            line=f"core {core} is {usual / speed:.1f} times slower than this node's median core",
            remedy="look for a throttled clock (heat, power, BIOS profile) and for another program on this core",
            subject=f"core {core}",
            figure=speed,
            unit="Gop/s",
            limit=limit,
        )
        for core, speed in sorted(speeds.items())
        if speed < limit
    ]
    if bad or slow:
        return [*bad, *slow]
    done, slowest = sum(each.done for each in cores.values()), min(speeds.values()) / usual
    line = (
        f"{len(cores)} cores, {done:,} results, every bit right; the slowest core has {slowest:.2f} of the usual speed"
    )
    return [Result(name=NAME, status=Status.OK, line=line, figure=usual, unit="Gop/s")]
