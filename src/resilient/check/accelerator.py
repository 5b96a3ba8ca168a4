"""Whether each accelerator computes right, over and over the same bits, and as fast as its like.

Only the worker process imports this: it imports torch, and a device may crash or hang whoever uses it.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch

from resilient.check import nvidia, pcie
from resilient.check.context import Context
from resilient.check.limits import Limits
from resilient.check.result import Result, Status, failed, skipped
from resilient.clock import SYSTEM_CLOCK, Clock, Deadline

NAME: Final = "accelerator"

_EXACT: Final = 1024
_LARGE: Final = 8192
_SEED: Final = 20240501


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one device did. ``wrong``: results that differ from exact arithmetic; ``unequal``: from the first one."""

    name: str
    kind: str
    done: int
    wrong: int
    unequal: int
    tflops: float


def check(context: Context) -> list[Result]:
    if not torch.accelerator.is_available():
        return [skipped(NAME, "torch finds none")]
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    count = torch.accelerator.device_count()
    each_s = min(context.chosen(1.0, 10.0), context.chosen(8.0, 60.0) / count)
    found = [measure(torch.device(kind.type, index), each_s, size=_LARGE) for index in range(count)]
    return [*judge(found, context.limits), *_at_work(torch.device(kind.type, 0), context)]


def measure(device: torch.device, duration_s: float, *, size: int, clock: Clock = SYSTEM_CLOCK) -> Device:
    """Multiply matrices on ``device`` for a while.

    First of small whole numbers, whose product in float32 is exact on any device: the reference is the processor's.
    Then of random bfloat16, each time the same: every result must have the bits of the first.
    """
    source = torch.Generator().manual_seed(_SEED)
    a = torch.randint(-8, 8, (_EXACT, _EXACT), generator=source).float()
    b = torch.randint(-8, 8, (_EXACT, _EXACT), generator=source).float()
    wrong = int(not torch.equal((a.to(device) @ b.to(device)).cpu(), a @ b))
    x = torch.randn(size, size, generator=source).to(device, torch.bfloat16)
    y = torch.randn(size, size, generator=source).to(device, torch.bfloat16)
    first = x @ y
    _wait(device)
    done, unequal, best_s = 0, 0, float("inf")
    deadline = Deadline(clock, duration_s)
    while not deadline.expired or done < 2:
        start = clock.monotonic()
        again = x @ y
        _wait(device)
        best_s = min(best_s, clock.monotonic() - start)
        unequal += not torch.equal(again, first)
        done += 1
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Device(
        name=str(device), kind=kind, done=done, wrong=wrong, unequal=unequal, tflops=2 * size**3 / best_s / 1e12
    )


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def judge(devices: Sequence[Device], limits: Limits) -> list[Result]:
    """Return a line for what is wrong with each bad device, or one for all of them."""
    results = []
    for device in devices:
        if device.wrong or device.unequal:
            what = (
                "a wrong product of whole numbers"
                if device.wrong
                else f"{device.unequal} of {device.done} times other bits for the same product"
            )
            remedy = "take this node out and have the device replaced: what it trains is wrong, too"
            results.append(failed(NAME, f"{device.name} computed {what}", remedy, subject=device.name))
    for kind in sorted({device.kind for device in devices}):
        alike = [device for device in devices if device.kind == kind]
        usual = statistics.median(device.tflops for device in alike)
        results += [_slow(device, usual, limits) for device in alike if device.tflops < limits.device_ratio * usual]
    if results:
        return results
    done = sum(device.done for device in devices)
    slowest = min(device.tflops for device in devices)
    line = f"{len(devices)} x {devices[0].kind}: {done:,} products, each bit as it must be; the slowest"
    return [Result(name=NAME, status=Status.OK, line=line, figure=slowest, unit="TFLOP/s")]


def _slow(device: Device, usual: float, limits: Limits) -> Result:
    return Result(
        name=NAME,
        status=Status.SLOW,
        line=f"{device.name} multiplies at {device.tflops / usual:.2f} of the speed of its like",
        remedy="look at its clocks and throttle reasons (nvidia-smi -q -d PERFORMANCE), and for another program on it",
        subject=device.name,
        figure=device.tflops,
        unit="TFLOP/s",
        limit=limits.device_ratio * usual,
    )


def _at_work(device: torch.device, context: Context) -> list[Result]:
    """Look at links and clocks while devices are at work: idle ones lower both to save power."""
    x = torch.ones(_LARGE, _LARGE, device=device, dtype=torch.bfloat16)
    for index in range(torch.accelerator.device_count()):
        one = x.to(torch.device(device.type, index))
        for _ in range(200):  # only queued: the device works on it while we look
            torch.mm(one, one)
    links = pcie.read_links(context)
    results = pcie.judge([link for link in links if link.kind in {"GPU", "accelerator"}], loaded=True)
    if device.type == "cuda" and torch.version.cuda:
        with suppress(OSError, subprocess.SubprocessError):  # the check of that name says so
            results += nvidia.judge(nvidia.parse(nvidia.ask()), 0, context.limits, loaded=True)
    torch.accelerator.synchronize()
    return [result for result in results if result.status in {Status.FAILED, Status.SLOW}]
