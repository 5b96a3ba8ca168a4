"""The account of runs with failures, beside what the training itself has written down of its time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from resilient.clock import SYSTEM_CLOCK
from resilient.report.account import read_ledger
from resilient.report.model import Incident, Ledger, Part
from resilient.store.open import open_store
from tests.crash import accounted
from tests.figures import Figures

RANKS = 2
LIMIT_S = 300
FEW = {50: ("sigkill", 1), 110: ("exception", 0)}
ALL = {
    50: ("sigkill", 1),
    110: ("exception", 0),
    170: ("hang", 1),
    230: ("exit", 0),
    290: ("sigstop", 0),
    350: ("worker", 1),
}
EVERY = 35
RECREATES = frozenset({"stop", "all"})
"""What ends the launcher as well: somebody starts it again."""


def train(folder: Path, plan: dict[int, tuple[str, int]], total: int, what: str = "sleep") -> list[dict[str, Any]]:
    """Run the training to its end, started anew whenever its launcher is gone; return what it has written down."""
    log = folder / "log"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
        f"--max-restarts={len(plan)}", accounted.__file__, str(folder / "run"), str(log), str(total),
        json.dumps(plan), str(EVERY), what,
    ]  # fmt: skip
    starts = 1 + sum(kind in RECREATES for kind, _ in plan.values())
    said = ""
    for _ in range(starts):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        said = done.stderr
    assert done.returncode == 0, said[-4000:]
    return [json.loads(line) for line in log.read_text().splitlines()]


def wall_s(lines: list[dict[str, Any]]) -> float:
    """Return the time from the first start of a process to the last end of one, as the processes themselves saw it."""
    began = min(line["process_s"] for line in lines if line["what"] == "began")
    return float(max(line["at"] for line in lines if line["what"] == "over") - began)


def truths(lines: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """Return what each injection cost: the time until another life of rank 0 was at the step that was reached."""
    found = []
    for injected in (line for line in lines if line["what"] == "inject"):
        again = (
            line["at"]
            for line in lines
            if line["what"] == "step"
            and line["rank"] == 0
            and line["step"] >= injected["step"]
            and line["at"] > injected["at"]
            and line["pid"] not in lived_before(lines, injected["at"])
        )
        found.append((injected["kind"], min(again) - injected["at"]))
    return found


def lived_before(lines: list[dict[str, Any]], at: float) -> set[int]:
    return {line["pid"] for line in lines if line["at"] <= at}


def check_sums(ledger: Ledger) -> None:
    assert sum(ledger.parts.values()) == pytest.approx(ledger.wall_s, abs=1e-3)
    assert min(ledger.parts.values()) >= 0
    for one in ledger.generations:
        assert sum(one.parts.values()) == pytest.approx(one.ended_s - one.began_s, abs=1e-3)
    for before, after in pairwise(ledger.generations):
        assert before.ended_s <= after.began_s + 1e-6


def read(folder: Path) -> Ledger:
    return read_ledger(open_store(folder / "run"), clock=SYSTEM_CLOCK)


@pytest.mark.proof
def test_the_parts_sum_to_the_wall_clock_and_each_failure_costs_what_it_took(
    tmp_path: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    plan = FEW if count(1, 2) == 1 else ALL
    found = figures("ledger", "What failures cost: the ledger, and the training's own log")
    lines = train(tmp_path, plan, max(plan) + 40, "sleep" if plan is FEW else "gpt")
    ledger = read(tmp_path)
    print(json.dumps({str(part): round(seconds, 2) for part, seconds in ledger.parts.items()}), ledger.missing)
    check_sums(ledger)
    assert ledger.wall_s == pytest.approx(wall_s(lines), rel=0.01)
    measured = truths(lines)
    assert len(ledger.incidents) == len(measured), [each.failure for each in ledger.incidents]
    for (kind, truth_s), incident in zip(measured, ledger.incidents, strict=True):
        print(f"{kind}: {truth_s:.2f} s, ledger {incident.cost_s:.2f} s: {costs(incident)}, {incident.failure}")
    for (kind, truth_s), incident in zip(measured, ledger.incidents, strict=True):
        assert incident.cost_s == pytest.approx(truth_s, rel=0.1), kind
    if len(found) == 0:
        for (kind, truth_s), incident in zip(measured, ledger.incidents, strict=True):
            found.add(
                kind=kind, truth_s=round(truth_s, 2), ledger_s=round(incident.cost_s, 2), failure=incident.failure
            )


def test_time_between_two_launches_is_idle_and_no_failure_if_somebody_has_stopped_it(
    tmp_path: Path, count: Callable[[int, int], int]
) -> None:
    plan = {25: ("stop", 0)} if count(1, 2) == 1 else {25: ("stop", 0), 80: ("all", 0)}
    lines = train(tmp_path, plan, max(plan) + 20)
    ledger = read(tmp_path)
    print(json.dumps({str(part): round(seconds, 2) for part, seconds in ledger.parts.items()}), ledger.missing)
    check_sums(ledger)
    assert ledger.wall_s == pytest.approx(wall_s(lines), rel=0.01)
    assert len(ledger.incidents) == len(plan) - 1
    begins = sorted({line["pid"]: line["process_s"] for line in lines if line["what"] == "began"}.values())
    gaps = [after - max(line["at"] for line in lines if line["at"] < after) for after in begins[RANKS::RANKS]]
    print(f"gaps {gaps}")
    assert ledger.parts.get(Part.IDLE, 0.0) == pytest.approx(sum(gaps), abs=1.0 * len(gaps))
    if len(plan) > 1:
        (kind, truth_s), incident = truths(lines)[1], ledger.incidents[0]
        print(f"{kind}: {truth_s:.2f} s, ledger {incident.cost_s:.2f} s: {costs(incident)}")
        assert incident.cost_s == pytest.approx(truth_s, rel=0.1)


def costs(incident: Incident) -> str:
    return ", ".join(f"{part} {seconds:.2f}" for part, seconds in incident.parts.items())
