"""When processes are started: the writer at the start of a run, and none for a save."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import resilient

PROGRAM = """
import errno, os, sys, threading, torch, resilient

full = False
tried = []

def refuse(event, arguments):  # as the system does where RLIMIT_NPROC is reached
    if full and event in {"os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen", "_thread.start_new_thread"}:
        tried.append(event)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

@resilient.train(sys.argv[1], every=10**6, keep=resilient.Keep(last=10), on_hang="off")  # its watcher starts later
def main(run):
    global full
    state = {"w": torch.rand(100_000)}
    run.track(state=state)
    for _ in run.steps(range(6), total=6):
        if run.step:
            run.save().wait(60)
        full = run.step >= 2
        state["w"].add_(1)
    full = False

sys.addaudithook(refuse)
main()
print(tried)
"""


@pytest.mark.field_report("BR-176")
def test_saves_go_on_where_no_further_process_or_thread_can_be_started(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run")], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    assert [found.step for found in resilient.checkpoints(tmp_path / "run")] == [6, 5, 4, 3, 2, 1]
