"""One run whose number of ranks changes again and again has the losses and the samples of one that never stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import resilient
from tests.figures import Figures

PROGRAM = Path(__file__).parent / "sizes.py"
SIZES = (4, 2, 3, 1, 4)
STEPS = 8  # of each size
ENDS = ("agent", "worker", "end")  # who is killed; or nobody, and the training function ends
LIMIT_S = 200.0
TOLERANCE = 1e-5


def start(ranks: int, place: Path, records: Path, steps: int, log: Path) -> subprocess.Popen[bytes]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, str(PROGRAM), str(place), str(records), str(steps)]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})


def steps_of(records: Path) -> dict[int, list[dict[str, Any]]]:
    """Return what the ranks of one life have recorded, by step; a line that a kill has torn is none."""
    found = defaultdict(list)
    for path in records.parent.glob(f"{records.name}-*"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                record = json.loads(line)
                found[record["step"]].append(record)
    return found


def complete(records: Path) -> dict[int, tuple[float, list[int]]]:
    """Return loss and samples of each step that all ranks of a life have recorded."""
    return {
        step: (sum(each["loss"] for each in ranks), sorted(index for each in ranks for index in each["used"]))
        for step, ranks in steps_of(records).items()
        if len(ranks) == ranks[0]["ranks"]
    }


def live(ranks: int, end: str, until: int, place: Path, records: Path, log: Path) -> None:
    """Train to about step ``until``, and come to such an end."""
    job = start(ranks, place, records, until if end == "end" else until + 6, log)
    try:
        end_s = time.monotonic() + LIMIT_S
        while job.poll() is None and (end == "end" or max(steps_of(records), default=0) < until):
            assert time.monotonic() < end_s, log.read_text()
            time.sleep(0.02)
        if end == "agent":
            job.kill()
        elif end == "worker" and job.poll() is None:
            worker = next(records.parent.glob(f"{records.name}-*"))
            os.kill(int(worker.name.rpartition("-")[2]), signal.SIGKILL)
        code = job.wait(LIMIT_S)
        assert code == 0 or end != "end", log.read_text()
    finally:
        job.kill()


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.field_report("BR-062", "BR-076", "BR-111", "BR-121")
def test_another_number_of_ranks_has_the_same_losses_and_every_sample_once(
    tmp_path: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    told = figures("sizes", "The GPT example in float64 on changing numbers of ranks, beside one that never stopped")
    if len(told):
        return
    sizes: Sequence[int] = SIZES[: count(0, len(SIZES))] or (2, 3, 1)
    log, total = tmp_path / "log", STEPS * len(sizes)
    assert start(0, tmp_path / "whole", tmp_path / "whole-records", total, log).wait(LIMIT_S) == 0, log.read_text()
    whole = complete(tmp_path / "whole-records")
    assert sorted(whole) == list(range(1, total + 1))

    lives, computed = [], 0
    for number, ranks in enumerate(sizes):
        end = "end" if number == len(sizes) - 1 else ENDS[number % len(ENDS)]
        records = tmp_path / f"records-{number}"
        live(ranks, end, STEPS * (number + 1), tmp_path / "run", records, log)
        lives.append(complete(records))
        computed += len(lives[-1])
        assert lives[-1], f"no step on {ranks} ranks: {log.read_text()}"
    assert resilient.checkpoints(tmp_path / "run")[0].step == total

    worst = 0.0
    for life in lives:  # also what a kill has made a later life compute again
        for step, (loss, used) in life.items():
            assert used == whole[step][1], f"step {step}"
            worst = max(worst, abs(loss / whole[step][0] - 1))
    assert worst <= TOLERANCE
    line = {step: used for life in lives for step, (_, used) in life.items()}
    samples = [index for used in line.values() for index in used]
    assert sorted(line) == list(range(1, total + 1))
    assert len(samples) == len(set(samples)) == 16 * total
    resumed = [int(step) for step in re.findall(r"resumed at step (\d+)", log.read_text())]
    assert len(resumed) == len(sizes) - 1, log.read_text()
    told.add(
        sizes="→".join(map(str, sizes)),
        resumed_at=", ".join(map(str, resumed)),
        steps=total,
        computed=computed,
        worst_difference=float(f"{worst:.1e}"),
        samples=len(samples),
    )
