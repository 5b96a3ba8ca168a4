"""A worker group that torchelastic restarts in place goes on from the newest checkpoint, at once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import resilient

PROGRAM = """
    import os, signal, sys
    import torch
    import torch.distributed as dist
    import resilient

    @resilient.train(sys.argv[1], every=2, keep=resilient.Keep(last=100))
    def main(run):
        state = {"sum": torch.zeros(1, dtype=torch.float64)}
        sampler = resilient.ElasticSampler(90, global_batch=9, seed=0)
        restored = run.track(state=state, data=sampler)
        life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        print("LIFE", life, "rank", run.rank, "from", run.step, flush=True)
        for batch in run.steps(sampler, total=30):
            if run.step == 7 * (life + 1) - 2:
                run.save().wait(60)
            part = torch.tensor([float(sum((i + 1) * (run.step + 1) for i in batch))], dtype=torch.float64)
            dist.all_reduce(part)
            state["sum"] += part
            if life < 3 and run.step == 7 * (life + 1) and run.rank == life % run.world_size:
                os.kill(os.getpid(), signal.SIGKILL)
        print("SUM", state["sum"].item(), flush=True)

    main()
"""


def test_workers_that_are_restarted_agree_and_continue(tmp_path: Path) -> None:
    program, log, place = tmp_path / "program.py", tmp_path / "log", tmp_path / "run"
    program.write_text(textwrap.dedent(PROGRAM))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "--max-restarts=3"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        done = subprocess.run(
            [*launch, str(program), str(place)], stdout=file, stderr=file, env=environ, timeout=200, check=False
        )
    text = log.read_text()
    assert done.returncode == 0, text
    for life in range(4):
        starts = re.findall(rf"LIFE {life} rank \d from (\d+)", text)
        assert len(starts) == 3, text
        assert len(set(starts)) == 1, f"life {life} starts at different steps: {starts}"
        assert life == 0 or int(starts[0]) >= 7 * life - 2, text

    expected = 0.0
    sampler = resilient.ElasticSampler(90, global_batch=9, seed=0, rank=0, world_size=1)
    for step in range(30):
        expected += sum((i + 1) * (step + 1) for i in next(iter(sampler)))
        sampler.advance()
    assert set(re.findall(r"SUM (\S+)", text)) == {str(expected)}
    assert resilient.checkpoints(place)[0].step == 30


STOPPED = """
    import sys, time, torch, resilient

    @resilient.train(sys.argv[1], every=10**6, max_bandwidth="0.4MB/s", compress="off")
    def main(run):
        state = {"w": torch.rand(2_500_000)}
        run.track(state=state)
        for _ in run.steps(range(10**6)):
            if run.step == 1:
                run.save().wait(60)
            if run.step == 2:  # which waits for as long as the first one was worth
                run.save().staged.result(60)
                print("STAGED", flush=True)
            state["w"].add_(1)
            time.sleep(0.05)

    main()
"""


@pytest.mark.field_report("BR-169")
def test_a_save_that_takes_longer_than_the_agent_waits_is_committed_after_it(tmp_path: Path) -> None:
    program, log, place = tmp_path / "program.py", tmp_path / "log", tmp_path / "run"
    program.write_text(textwrap.dedent(STOPPED))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    launch += ["--shutdown-timeout=1", str(program)]
    with log.open("wb") as file:
        agent = subprocess.Popen(
            [*launch, str(place)], stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    end = time.monotonic() + 120
    while "STAGED" not in log.read_text():
        assert agent.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)
    agent.send_signal(signal.SIGTERM)
    agent.wait(60)
    assert [each.step for each in resilient.checkpoints(place)] == [1], "the save was too quick for this test"
    assert "ended within 1 s (torchrun's --shutdown-timeout); start torchrun with --shutdown" in log.read_text()
    while [each.step for each in resilient.checkpoints(place)][-2:] != [2, 1]:
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)
