"""The whole story in two minutes: a training is killed, resumes on fewer ranks, finishes, and is verified.

Run by `make demo`. Keeps ./demo-run; starts over if it is there already.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RUN = Path("demo-run")
TRAINING = Path(__file__).resolve().parent / "gpt" / "fsdp2.py"
PROGRAM = Path(sys.executable).with_name("resilient")
STEPS, EVERY, RANKS_BEFORE, RANKS_AFTER, VICTIM = 120, 10, 3, 2, 1
LIMIT_S = 100.0


def main() -> None:
    started_s = time.monotonic()
    shutil.rmtree(RUN, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        say(f"1. A small GPT learns Python: {STEPS} steps on {RANKS_BEFORE} ranks (FSDP2), a save every {EVERY} steps.")
        reached, process = train_and_kill(log)
        say(f"2. SIGKILL for rank {VICTIM} (process {process}) after step {reached}: the whole job is down.")
        say(f"3. The same command again, on {RANKS_AFTER} ranks.")
        resumed, text = train_to_the_end(log)
    found, verified = resilient("ls")["checkpoints"], resilient("verify", "--deep")
    losses = re.findall(r"step \d+: loss (\S+)", text)
    size = re.findall(r"saved by \d+ ranks: (\S+ \S+) read", text)[0]
    everything = "ok" if verified["ok"] else f"DAMAGED: {verified['bad']}"

    say("\nWhat happened:")
    say(f"  lost      {reached - resumed} steps of work: step {reached} was reached, step {resumed} was committed")
    say(f"  reused    step {resumed}, saved by {RANKS_BEFORE} ranks: {size} read and verified by rank 0 alone")
    say(f"  finished  step {found[0]['step']} on {found[0]['world_size']} ranks, loss {losses[0]} -> {losses[-1]}")
    say(f"  kept      steps {', '.join(str(each['step']) for each in found)}, {found[0]['nbytes'] >> 10} KiB each")
    say(f"  verified  {verified['checked']} objects, every byte of them: {everything}")
    say(f"  took      {time.monotonic() - started_s:.0f} s")
    name = "resilient" if shutil.which("resilient") else os.path.relpath(PROGRAM)
    say(f"\nIt is all in ./{RUN}. Try:\n  {name} ls {RUN}\n  {name} show {RUN}\n  {name} verify {RUN}")
    if not verified["ok"] or found[0]["step"] != STEPS:
        sys.exit(1)


def train_and_kill(log: Path) -> tuple[int, int]:
    """Return the last step before the kill, and which process it hit."""
    job = start(RANKS_BEFORE, log)
    end_s = time.monotonic() + LIMIT_S
    while last_step(log) < 4 * EVERY + 5:
        if job.poll() is not None or time.monotonic() > end_s:
            sys.exit(f"the training did not get going:\n{log.read_text()[-3000:]}")
        time.sleep(0.02)
    worker = pid_of_rank(job.pid, VICTIM)
    os.kill(worker, signal.SIGKILL)
    job.wait(LIMIT_S)  # torchrun ends the other ranks
    return last_step(log), worker


def train_to_the_end(log: Path) -> tuple[int, str]:
    """Return the step from which the training resumed, and all that it printed."""
    expected = int(resilient("ls")["checkpoints"][0]["step"])
    code = start(RANKS_AFTER, log).wait(LIMIT_S)
    text = log.read_text()
    resumed = re.findall(r"resumed at step (\d+)", text)
    if code != 0 or resumed != [str(expected)]:
        sys.exit(f"exit code {code}; resumed at {resumed}, expected {expected}:\n{text[-3000:]}")
    return expected, text


def start(ranks: int, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(TRAINING), "--store", str(RUN), "--steps", str(STEPS), "--every", str(EVERY)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:  # not a pipe, which would stay open for as long as any process of the job lives
        return subprocess.Popen(command, stdout=file, stderr=file, env=environ)  # noqa: S603 -- the command above


def last_step(log: Path) -> int:
    return max(map(int, re.findall(r"step (\d+): loss", log.read_text())), default=0)


def pid_of_rank(agent: int, rank: int) -> int:
    for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    sys.exit(f"rank {rank} is not among the processes that torchrun ({agent}) started")


def resilient(command: str, *flags: str) -> Any:
    done = subprocess.run([PROGRAM, command, RUN, *flags, "--json"], capture_output=True, check=False)  # noqa: S603
    return json.loads(done.stdout)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
