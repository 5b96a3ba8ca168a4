"""What it takes of a training to be observed, with everything on: `python benchmarks/observing.py`.

The GPT of the examples trains in two ranks on gloo, in lives with and without observing by turns: pictures of steps,
samples of the machine, numbers for Prometheus in a file; the journal is written in both. Given are:

- the processor time of what runs in the trainer, a step, as a share of the processor time of a step: hooks on the
  training thread (by its own clock around them), the profiler's own part in the steps that are looked at (by how much
  more their training thread takes than that of their neighbors), the sinks of events, and the threads (by the kernel's
  clock of each thread);
- how often a step is looked at, once that is settled, and what one look takes;
- the ratio of the times of steps with and without, from pairs of lives, with its interval.
"""

from __future__ import annotations

import argparse
import itertools
import json
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

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "gpt"))

RANKS, BATCH = 2, 16
LOOK_S = 5e-4  # what takes longer than that is no mere hook
WARM_UP = 150  # the first looks of a life come sooner: what they cost is not known yet
_OURS = ("resilient-picture", "resilient-machine", "resilient-journal", "resilient-metrics-file")


class Meter:
    """Processor time of the training thread within calls that are replaced by ones that are timed."""

    def __init__(self) -> None:
        self.total_s = {"hooks": 0.0, "looks": 0.0, "sinks": 0.0}
        self.profiling_s: list[float] = []  # of bodies of turns, with the profiler on
        self.plain_s: list[float] = []
        self.looks_s: list[float] = []
        self._within = False
        self._thread = threading.get_ident()
        self._own_s = self.own_s()

    def time(self, owner: Any, name: str, kind: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            if threading.get_ident() != self._thread or self._within:
                return inner(*args, **named)
            self._within = True
            began_s = time.thread_time()
            try:
                return inner(*args, **named)
            finally:
                took_s = time.thread_time() - began_s - self._own_s
                self.total_s["looks" if kind == "hooks" and took_s > LOOK_S else kind] += took_s
                self._within = False

        setattr(owner, name, timed)

    @staticmethod
    def own_s() -> float:
        """Return what the clock shows of a call that does nothing, which is the clock's own."""
        count, total_s = 20_000, 0.0
        for _ in range(count):
            began_s = time.thread_time()
            total_s += time.thread_time() - began_s
        return total_s / count

    def watch_turns(self, picture: Any) -> None:
        """Time the bodies of turns apart, by whether they are looked at, and what looks take before and after."""
        begin, end = picture.begin, picture.end
        began = [0.0, 0.0]

        def timed_begin(self_: Any, data_s: float, step: int) -> None:
            entered_s = time.thread_time()
            begin(self_, data_s, step)
            began[:] = time.thread_time() - entered_s, time.thread_time()

        def timed_end(self_: Any) -> None:
            entered_s = time.thread_time()
            looked = self_._profile is not None  # noqa: SLF001 -- nothing else shows it
            (self.profiling_s if looked else self.plain_s).append(entered_s - began[1])
            end(self_)
            if looked:
                self.looks_s.append(began[0] + time.thread_time() - entered_s)

        picture.begin, picture.end = timed_begin, timed_end


def threads_cpu_s() -> dict[str, float]:
    """Return the processor time that each of our threads has taken so far."""
    found = dict.fromkeys(_OURS, 0.0)
    for thread in threading.enumerate():
        if thread.name in found:
            path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
            found[thread.name] += int(path.read_text().split()[0]) / 1e9
    return found


def rank_main(place: str, steps: int, *, observed: bool) -> None:
    """Train; print a line of JSON."""
    import torch
    from model import GPT, Text
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    import resilient
    from resilient.events import Bus
    from resilient.run.picture import Picture

    torch.set_num_threads(1)
    meter = Meter()
    meter.watch_turns(Picture)
    for name in ("begin", "end", "_before_step", "_after_step"):
        meter.time(Picture, name, "hooks")
    meter.time(Bus, "emit", "sinks")
    settings: dict[str, Any] = {"picture_every": 0, "sample_machine_s": 0}
    if observed:
        settings = {"picture_every": 20, "metrics_file": f"{place}.prom", "sla": 0.5}

    @resilient.train(place, every=25, compare_every_s=10.0, **settings)
    def main(run: resilient.Run) -> None:
        data = Text()
        torch.manual_seed(0)
        model = DistributedDataParallel(GPT())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        sampler = resilient.ElasticSampler(len(data), global_batch=BATCH * run.world_size, seed=0)
        run.track(model=model, optimizer=optimizer, data=sampler)
        times: list[float] = []
        first: list[float] = []
        before = time.monotonic(), time.process_time(), dict(meter.total_s), threads_cpu_s()
        for inputs, targets in run.steps(DataLoader(data, batch_sampler=sampler), total=steps):
            if run.step == WARM_UP:
                first = meter.looks_s[:]
                meter.profiling_s.clear()
                meter.looks_s.clear()
                before = time.monotonic(), time.process_time(), dict(meter.total_s), threads_cpu_s()
            model(inputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.monotonic())
        count = steps - WARM_UP
        wall_s = time.monotonic() - before[0]
        threads = {name: (now - before[3][name]) / count for name, now in threads_cpu_s().items()}
        took = [after - earlier for earlier, after in itertools.pairwise(times[WARM_UP:])]
        looked = meter.profiling_s
        in_step_s = max(0.0, statistics.median(looked) - statistics.median(meter.plain_s)) if looked else 0.0
        figures = {
            "rank": run.rank,
            "step_s": statistics.median(took),
            "mean_step_s": statistics.fmean(took),
            "step_cpu_s": (time.process_time() - before[1]) / count,
            "called_s": {kind: (now - before[2][kind]) / count for kind, now in meter.total_s.items()},
            "in_step_s": in_step_s * len(looked) / count,
            "threads_s": threads,
            "machine_share": threads["resilient-machine"] * count / wall_s,
            "looks": len(looked),
            "look_s": (statistics.median(meter.looks_s) + in_step_s) if looked else 0.0,
            "first_looks_s": sum(first),
            "steps": count,
        }
        tell_figures(figures)

    main()


def train(folder: str, steps: int, *, observed: bool) -> list[dict[str, Any]]:
    options = ["--rank-of", str(Path(folder) / "run"), "--steps", str(steps), *(["--observed"] if observed else [])]
    return figures_of([__file__, *options], RANKS)


def share_of(figures: dict[str, Any]) -> float:
    ours_s = sum(figures["called_s"].values()) + figures["in_step_s"] + sum(figures["threads_s"].values())
    return float(ours_s / figures["step_cpu_s"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1500, help="of each life")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of lives, observed and not")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--observed", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank_main(arguments.rank_of, arguments.steps, observed=arguments.observed)
        return
    ratios, means, seen = [], [], []
    for number in range(arguments.rounds):
        steps_s, means_s = {}, {}
        for observed in random.Random(number).sample([True, False], 2):
            with tempfile.TemporaryDirectory() as folder:
                found = train(folder, arguments.steps, observed=observed)
            steps_s[observed] = statistics.median(each["step_s"] for each in found)
            means_s[observed] = statistics.median(each["mean_step_s"] for each in found)
            seen += found if observed else []
        ratios.append(steps_s[True] / steps_s[False])
        means.append(means_s[True] / means_s[False])
    low, high = bootstrap(means)
    names = seen[0]["threads_s"]

    def percent(value: Callable[[dict[str, Any]], float]) -> float:
        return round(100 * statistics.median(value(each) / each["step_cpu_s"] for each in seen), 4)

    figures = {
        "benchmark": "observing",
        "ranks": RANKS,
        "step_ms": round(1000 * statistics.median(each["step_s"] for each in seen), 3),
        "step_cpu_ms": round(1000 * statistics.median(each["step_cpu_s"] for each in seen), 3),
        "share_of_a_step_percent": round(100 * statistics.median(map(share_of, seen)), 4),
        "worst_percent": round(100 * max(map(share_of, seen)), 4),
        "hooks_percent": percent(lambda each: each["called_s"]["hooks"]),
        "looks_percent": percent(lambda each: each["called_s"]["looks"]),
        "sinks_percent": percent(lambda each: each["called_s"]["sinks"]),
        "profiler_in_steps_percent": percent(lambda each: each["in_step_s"]),
        "threads_percent": {name: percent(lambda each, name=name: each["threads_s"][name]) for name in names},  # type: ignore[misc]
        "machine_percent_of_a_core": round(100 * max(each["machine_share"] for each in seen), 4),
        "looks_in_steps": [sum(each["looks"] for each in seen), sum(each["steps"] for each in seen)],
        "look_cpu_ms": round(1000 * statistics.median(each["look_s"] for each in seen), 3),
        "first_looks_cpu_ms": round(1000 * statistics.median(each["first_looks_s"] for each in seen), 3),
        "median_step_ratio": round(statistics.median(ratios), 4),
        "mean_step_ratio": round(statistics.median(means), 4),
        "interval": [round(low, 4), round(high, 4)],
        "verdict": "inconclusive" if low <= 1.0 <= high else "slower" if low > 1.0 else "faster",
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
