"""What the detectors of hangs and stragglers take of a training: `python benchmarks/detectors.py`.

The GPT of the examples trains in two ranks, in rounds with the detectors on and off by turns, in the same processes.
Given are, for each rank: the processor time of everything that the detectors run in the trainer (marks and hooks on the
training thread, measured by calling them as a turn does; digests of replicas on the training thread, by its own clock
around them; the threads that beat and compare, by the kernel's clock of each thread) as a share of the processor time
of a step; what the watcher process takes of a core; and the ratio of the times of steps, with its interval.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from children import figures_of, tell_figures
from measuring import bootstrap

from resilient.detect import proc

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "gpt"))

RANKS, BATCH = 2, 16
LEAST_OF_TURNS = 50_000
COMPARED = 100  # the default: replicas are compared within so many steps
_OURS = ("resilient-beat", "resilient-stragglers", "resilient-replicas")


def hooks_cpu_s() -> float:
    """Return the processor time that marks and hooks take on the training thread in a turn with a save."""
    import torch

    from resilient.detect.page import Owner, Page
    from resilient.run.sections import Sections
    from resilient.run.watch_compute import Compute

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        page = Page(Path(folder) / "page", Owner(pid=os.getpid(), rank=0, signal=0, thread=0))
        sections, compute = Sections(page), Compute({"model": torch.nn.Linear(2, 2)})
        sections.begin_compute, sections.end_compute = compute.begin, compute.end

        def turns(*, marked: bool) -> float:
            began_s = time.thread_time()
            if marked:
                for _ in sections.turns(lambda: iter(range(LEAST_OF_TURNS)), lambda: 7):
                    compute._on_gradient(0, None)  # noqa: SLF001 -- what torch calls
                    with sections.within("save"):
                        pass
                sections.take()
            else:
                for _ in iter(range(LEAST_OF_TURNS)):
                    pass
            return (time.thread_time() - began_s) / LEAST_OF_TURNS

        found = min(turns(marked=True) for _ in range(5)) - min(turns(marked=False) for _ in range(5))
        compute.close()
        return found


def threads_cpu_s() -> float:
    """Return the processor time that the detectors' threads have taken so far."""
    total = 0.0
    for thread in threading.enumerate():
        if thread.name in _OURS:
            path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
            total += int(path.read_text().split()[0]) / 1e9
    return total


def watcher_cpu_s() -> float:
    """Return the processor time that the watcher process of this rank has taken so far."""
    for child in proc.children(os.getpid()):
        if "resilient.detect.watcher" in proc.command(child):
            return int(Path(f"/proc/{child}/schedstat").read_text().split()[0]) / 1e9
    return 0.0


def timed_digests() -> Callable[[], float]:
    """Return what tells the processor time that digests of replicas have taken on the training thread."""
    from resilient.engine.replica_watch import ReplicaWatch

    inner, total_s = ReplicaWatch.at_boundary, 0.0

    def at_boundary(self: ReplicaWatch, step: int) -> None:
        nonlocal total_s
        began_s = time.thread_time()
        inner(self, step)
        total_s += time.thread_time() - began_s

    ReplicaWatch.at_boundary = at_boundary  # type: ignore[method-assign]
    return lambda: total_s


def rank_main(place: str, steps: int, on_hang: str) -> None:
    """Train; print a line of JSON."""
    import torch
    from model import GPT, Text
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    import resilient

    torch.set_num_threads(1)
    digests_cpu_s = timed_digests()
    compared = 0 if on_hang == "off" else COMPARED

    @resilient.train(place, every=25, on_hang=on_hang, compare_every_s=5.0, compare_replicas=compared)
    def main(run: resilient.Run) -> None:
        data = Text()
        torch.manual_seed(0)
        model = DistributedDataParallel(GPT())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        sampler = resilient.ElasticSampler(len(data), global_batch=BATCH * run.world_size, seed=0)
        run.track(model=model, optimizer=optimizer, data=sampler)
        times: list[float] = []
        before = (0.0,) * 5

        def clocks() -> tuple[float, ...]:
            return time.monotonic(), time.process_time(), threads_cpu_s(), watcher_cpu_s(), digests_cpu_s()

        for inputs, targets in run.steps(DataLoader(data, batch_sampler=sampler), total=steps):
            if run.step == 10:
                before = clocks()
            model(inputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.monotonic())
        wall_s, cpu_s, threads_s, watcher_s, digests_s = (
            now - then for now, then in zip(clocks(), before, strict=True)
        )
        took = [after - before for before, after in itertools.pairwise(times[10:])]
        figures = {
            "rank": run.rank,
            "step_s": statistics.median(took),
            "step_cpu_s": cpu_s / (steps - 10),
            "threads_s": threads_s / (steps - 10),
            "digests_s": digests_s / (steps - 10),
            "watcher_share": watcher_s / wall_s,
        }
        tell_figures(figures)

    main()


def train(folder: str, steps: int, on_hang: str) -> list[dict[str, Any]]:
    return figures_of([__file__, "--rank-of", folder, "--steps", str(steps), "--on-hang", on_hang], RANKS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200, help="of each life")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of lives, with and without detectors")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--on-hang", default="report", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank_main(arguments.rank_of, arguments.steps, arguments.on_hang)
        return
    hooks_s = hooks_cpu_s()
    ratios, shares, steps_s, beside, cpus_s, digests = [], [], [], [], [], []
    for number in range(arguments.rounds):
        medians = {}
        for on_hang in random.Random(number).sample(["report", "off"], 2):
            with tempfile.TemporaryDirectory() as folder:
                found = train(folder, arguments.steps, on_hang)
            medians[on_hang] = statistics.median(each["step_s"] for each in found)
            if on_hang == "report":
                shares += [(each["threads_s"] + each["digests_s"] + hooks_s) / each["step_cpu_s"] for each in found]
                digests += [each["digests_s"] / each["step_cpu_s"] for each in found]
                beside += [each["watcher_share"] for each in found]
                cpus_s += [each["step_cpu_s"] for each in found]
                steps_s.append(medians[on_hang])
        ratios.append(medians["report"] / medians["off"])
    low, high = bootstrap(ratios)
    figures = {
        "benchmark": "detectors",
        "ranks": RANKS,
        "step_ms": round(1000 * statistics.median(steps_s), 3),
        "step_cpu_ms": round(1000 * statistics.median(cpus_s), 3),
        "hooks_us_a_turn": round(1e6 * hooks_s, 2),
        "share_of_a_step_percent": round(100 * statistics.median(shares), 4),
        "digests_percent": round(100 * statistics.median(digests), 4),
        "worst_percent": round(100 * max(shares), 4),
        "watcher_percent_of_a_core": round(100 * statistics.median(beside), 4),
        "step_ratio": round(statistics.median(ratios), 4),
        "interval": [round(low, 4), round(high, 4)],
        "verdict": "inconclusive" if low <= 1.0 <= high else "slower" if low > 1.0 else "faster",
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
