"""Every example is started, killed in the middle, started again, and comes to its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import resilient

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 120.0


def start(name: str, ranks: int, place: Path, steps: int, log: Path) -> subprocess.Popen[bytes]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    options = ["--store", str(place), "--steps", str(steps), "--every", "5"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(EXAMPLES / "gpt" / f"{name}.py"), *options]
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environ)


def a_worker_of(job: subprocess.Popen[bytes]) -> int:
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    return next(int(pid) for pid in children if b"RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())


def settled(place: Path) -> int:
    """Return the newest step when the writers, which outlive their trainers, have finished what they had in hand."""
    newest, since_s = -1, time.monotonic()
    while time.monotonic() - since_s < 2:
        step = resilient.checkpoints(place)[0].step
        if step != newest:
            newest, since_s = step, time.monotonic()
        time.sleep(0.1)
    return newest


@pytest.mark.parametrize(("name", "before", "after"), [("single", 0, 0), ("ddp", 2, 2), ("fsdp2", 2, 1)])
def test_an_example_that_is_killed_continues_where_it_was(name: str, before: int, after: int, tmp_path: Path) -> None:
    place, log = tmp_path / "run", tmp_path / "log"
    job = start(name, before, place, 1_000_000, log)
    try:
        end_s = time.monotonic() + LIMIT_S
        while not re.search(r"saved step ([5-9]|\d{2,})", log.read_text()):
            assert job.poll() is None, log.read_text()
            assert time.monotonic() < end_s, log.read_text()
            time.sleep(0.05)
        os.kill(a_worker_of(job) if before else job.pid, signal.SIGKILL)
        assert job.wait(LIMIT_S) != 0
    finally:
        job.kill()
    safe = settled(place)

    again = start(name, after, place, safe + 8, log)
    try:
        assert again.wait(LIMIT_S) == 0, log.read_text()
    finally:
        again.kill()
    assert f"resumed at step {safe}" in log.read_text()
    assert f"now at step {safe + 8}; the newest committed step is {safe + 8}" in log.read_text()
    assert resilient.checkpoints(place)[0].step == safe + 8


def test_the_examples_are_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.rglob("*.py")}
    assert {"single.py", "ddp.py", "fsdp2.py", "demo.py"} <= set(lengths)
    assert all(length < 120 for length in lengths.values()), lengths
