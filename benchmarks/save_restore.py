"""What a save and a restore of one process cost, beside torch.save, DCP and the machine's own limit, in one run.

Usage: python benchmarks/save_restore.py [--mib 512] [--rounds 5] [--folder DIR]

Every round does everything once, in a fixed order; figures are medians with their range, one JSON line each. Buffers
are touched before the first round. On a shared machine compare ratios, not seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import resilient

TENSORS = 32


def make_state(mib: int) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.randn(mib * 1024 * 1024 // 4 // TENSORS) for number in range(TENSORS)}


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def raw_write(path: Path, data: memoryview) -> None:
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), 4 << 20):
            file.write(data[start : start + (4 << 20)])
        os.fsync(file.fileno())


def torch_save(state: dict[str, torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


class Bench:
    def __init__(self, mib: int, folder: Path) -> None:
        self.state = make_state(mib)
        self.into = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        self.spare = {name: tensor.clone() for name, tensor in self.state.items()}
        self.folder = folder
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        self.step = 0

    def round(self) -> None:
        self.step += 1
        self._limits()
        self._peers()
        self._resilient()

    def _limits(self) -> None:
        whole = memoryview(torch.cat([t.view(torch.uint8) for t in self.state.values()]).numpy())
        self._note("limit: copy in memory", lambda: [self.spare[n].copy_(t) for n, t in self.state.items()])
        self._note("limit: raw write and fsync", lambda: raw_write(self.folder / "raw", whole))

    def _peers(self) -> None:
        self._note("torch.save and fsync", lambda: torch_save(self.state, self.folder / "torch.pt"))
        self._note("torch.load", lambda: torch.load(self.folder / "torch.pt", weights_only=True))
        place = self.folder / f"dcp-{self.step}"
        self._note("DCP save", lambda: dcp.save(self.state, checkpoint_id=place, no_dist=True))
        self._note("DCP load", lambda: dcp.load(self.into, checkpoint_id=place, no_dist=True))
        shutil.rmtree(place)

    def _resilient(self) -> None:
        place = str(self.folder / "run")
        handles: list[resilient.SaveHandle] = []
        self._note(
            "resilient: training stalls",
            lambda: handles.append(resilient.save(place, self.step, {"state": self.state})),
        )
        begin = time.perf_counter()
        handles[0].wait(600)
        self.times["resilient: committed after the stall"].append(time.perf_counter() - begin)
        self._note("resilient: load, every byte verified", lambda: resilient.load(place, {"state": self.into}))

    def _note(self, what: str, work: Callable[[], object]) -> None:
        self.times[what].append(timed(work))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help="on the disk to be measured")
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    bench = Bench(args.mib, args.folder)
    bench.round()  # warms up: the first touch of memory and of the page cache is the slowest
    bench.times.clear()
    for _ in range(args.rounds):
        bench.round()
    for what, times in bench.times.items():
        median = statistics.median(times)
        figure = {
            "what": what,
            "mib": args.mib,
            "median_s": round(median, 4),
            "gib_per_s": round(args.mib / 1024 / median, 3),
        }
        print(json.dumps(figure | {"min_s": round(min(times), 4), "max_s": round(max(times), 4), "rounds": len(times)}))
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
