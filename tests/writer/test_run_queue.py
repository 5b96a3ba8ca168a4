"""Waiting for a processor is told apart from waiting for anything else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resilient.writer.run_queue import RunQueue

BURN = "import os; os.sched_setaffinity(0, {%d}); print(flush=True)\nwhile True: pass"
WHY_NOT = None if Path("/proc/self/schedstat").exists() else "the kernel counts no waits (CONFIG_SCHED_INFO)"

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")


def waits_of(work: Callable[[], object]) -> tuple[float, float]:
    """Do some work in a thread; return how long it took, and how long it waited for a processor."""
    found = []

    def timed() -> None:
        os.sched_setaffinity(0, {cpu()})
        queue, began_s = RunQueue(), time.monotonic()
        work()
        found.append((time.monotonic() - began_s, queue.waited_s()))

    thread = threading.Thread(target=timed)
    thread.start()
    thread.join()
    return found[0]


def cpu() -> int:
    return min(os.sched_getaffinity(os.getpid()))


def burn(cpu_s: float) -> None:
    end_s = time.thread_time() + cpu_s
    while time.thread_time() < end_s:
        pass


def test_a_thread_that_shares_its_processor_waits_for_it() -> None:
    others = [
        subprocess.Popen([sys.executable, "-c", BURN % cpu()], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    try:
        for other in others:
            assert other.stdout is not None
            other.stdout.readline()
        took_s, waited_s = waits_of(lambda: burn(0.3))
    finally:
        for other in others:
            other.kill()
            other.communicate()
    assert took_s > 0.5
    assert waited_s == pytest.approx(took_s - 0.3, rel=0.2)


def test_who_sleeps_does_not_wait_for_a_processor() -> None:
    took_s, waited_s = waits_of(lambda: time.sleep(0.5))
    assert waited_s < 0.3 * took_s
