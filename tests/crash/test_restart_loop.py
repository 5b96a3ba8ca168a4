"""G14: no crash loop. A checkpoint that leads to failure is demoted; what fails without it too ends in a verdict."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import resilient
from resilient.catalog.marks import FAILED, RUN, read_mark
from resilient.format.layout import Attempt
from resilient.store.local import LocalStore

PROGRAM = Path(__file__).with_name("looping.py")


def torchrun(place: Path, total: int, case: str, *, max_restarts: int) -> tuple[int, str]:
    """Run the training on two ranks until torchrun ends; return its exit code and what was printed."""
    log = place.with_name(f"log-{case}-{total}")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, f"--max-restarts={max_restarts}", str(PROGRAM), str(place), str(total), case]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        code = process.wait(580)
    finally:
        process.terminate()  # it takes its workers along, which a kill would leave behind
        process.wait(60)
    return code, log.read_text(errors="replace")


def starts(log: str) -> list[int]:
    """Return where each life that trained has started from."""
    return [int(step) for step in re.findall(r"START rank 0 from (\d+)", log)]


def attempt_at(place: Path, step: int) -> Attempt:
    (folder,) = place.glob(f"steps/{step:012d}/*")
    generation, _, nonce = folder.name.removeprefix("g").partition("-")
    return Attempt(step=step, generation=int(generation), nonce=nonce)


@pytest.mark.timeout(1200)
@pytest.mark.field_report("BR-232")
def test_a_poisoned_checkpoint_is_left_behind_after_two_restarts(tmp_path: Path) -> None:
    place = tmp_path / "run"
    code, log = torchrun(place, 15, "poison", max_restarts=0)
    assert code == 0, log
    poisoned = attempt_at(place, 15)

    code, log = torchrun(place, 40, "clean", max_restarts=2)
    assert code == 0, log
    assert starts(log) == [15, 15, 10], log
    assert len(re.findall("step 15 is marked failed from now on: two numeric failures alike", log)) == 1, log
    assert "step 15 is not usable, taking an older one: marked failed by the run" in log
    assert resilient.checkpoints(place)[0].step == 40
    mark = read_mark(LocalStore(place), poisoned, FAILED, RUN)
    assert mark is None or "FloatingPointError: the loss is nan at step #" in mark.why  # None: collected since


@pytest.mark.timeout(1200)
@pytest.mark.field_report("BR-190")
def test_what_fails_at_the_same_step_from_an_older_checkpoint_too_ends_in_a_verdict(tmp_path: Path) -> None:
    place = tmp_path / "run"
    code, log = torchrun(place, 40, "same-step", max_restarts=4)
    assert code != 0
    assert starts(log) == [0, 10, 10, 5], "it went on after the verdict, or gave up before"
    assert "it is not the checkpoint (ValueError: record # cannot be decoded)" in log
    assert "crash-loop" in log

    code, log = torchrun(place, 40, "clean", max_restarts=0)  # mended, and started anew
    assert code == 0, log
    assert starts(log) == [10], "what was demoted for nothing is not taken again"
    assert resilient.checkpoints(place)[0].step == 40
