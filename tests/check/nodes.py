"""Processes that stand for nodes: each takes part in the pair tests, over gloo; some of them are slow or bad."""

from __future__ import annotations

import os
import signal
import time
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import torch

from resilient.check.across import Part
from resilient.check.pair_node import take_part
from resilient.check.pair_turn import Work
from resilient.check.result import Result, Status, passed, worst
from resilient.check.suite import Ended
from resilient.clock import SYSTEM_CLOCK, SystemClock
from resilient.config import read_process
from tests.lives import Life


class Slow(Work):
    """Takes three times as long for all that is measured."""

    def compute(self) -> None:
        start = time.perf_counter()
        super().compute()
        time.sleep(2 * (time.perf_counter() - start))

    def all_reduce(self, values: torch.Tensor) -> None:
        start = time.perf_counter()
        super().all_reduce(values)
        time.sleep(2 * (time.perf_counter() - start))


class Wrong(Work):
    """Adds something else than it should: one bit of one number."""

    def all_reduce(self, values: torch.Tensor) -> None:
        values[len(values) // 3] += 1
        super().all_reduce(values)


class Crash(Work):
    """Ends in the middle of each test, as a device's crash ends it."""

    def all_reduce(self, values: torch.Tensor) -> None:
        os._exit(3)


class Hang(Work):
    """Never comes back from a test."""

    def compute(self) -> None:
        time.sleep(3600)


class Die(Work):
    """Its node is lost in the first test."""

    def all_reduce(self, values: torch.Tensor) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


class Ahead(SystemClock):
    """Shows a time of day that is 5.5 ms ahead."""

    def now(self) -> datetime:
        return super().now() + timedelta(milliseconds=5.5)


FAULTS: dict[str, type[Work]] = {
    "slow": Slow,
    "wrong": Wrong,
    "crash": Crash,
    "hang": Hang,
    "die": Die,
}


def node(folder: str, faults: dict[int, str], timeout_s: float) -> None:
    process = read_process()
    assert process.master is not None
    address, _, port = process.master.rpartition(":")
    part = Part(
        node=process.rank,
        nodes=process.world_size,
        host=f"host{process.rank}",
        address=address,
        port=int(port),
        prefix="check",
        local=[passed("alone", f"of {process.rank}")],
        nbytes=1 << 18,
        come_s=60.0,
        turn_s=0.7,
        timeout_s=timeout_s,
    )
    fault = faults.get(process.rank, "none")
    ended = take_part(part, FAULTS.get(fault, Work), Ahead() if fault == "ahead" else SYSTEM_CLOCK)
    Path(folder, f"{process.rank}.json").write_bytes(msgspec.json.encode(ended))


def heard(folder: Path, number: int) -> tuple[list[Result], Status]:
    """Return what a node has heard at the end."""
    ended = msgspec.json.decode((folder / f"{number}.json").read_bytes(), type=Ended)
    return ended.results, ended.end


def check_nodes(
    count: int, folder: Path, faults: dict[int, str], *, timeout_s: float = 10.0
) -> dict[str, list[Result]]:
    """Check so many nodes, with faults by number; return node 0's results of the pairs, by node."""
    life = Life(count, folder, node, str(folder), faults, timeout_s)
    codes = life.wait()
    dead = [number for number, fault in faults.items() if fault == "die"]
    assert [number for number, code in enumerate(codes) if code] == dead, life.output()
    results, end = heard(folder, 0)
    assert end == worst(results)
    for number in set(range(1, count)) - set(dead):  # all have heard the same
        assert heard(folder, number) == ([each for each in results if each.node == f"host{number}"], end)
    return {f"host{number}": [each for each in results if each.node == f"host{number}"] for number in range(count)}
