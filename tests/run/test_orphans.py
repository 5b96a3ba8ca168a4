"""Workers end with their agent, whatever they are doing and however it ends; what they had staged is committed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import resilient
from resilient.catalog.process import started
from tests.figures import Figures

LIMIT_S = 120.0
GONE_WITHIN_S = 5.0
RANKS = 2

TRAINING = """
    import os, sys, time, torch, resilient
    import torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset
    from resilient.testing import hold_gil

    class Slow(Dataset):
        def __len__(self):
            return 10
        def __getitem__(self, index):
            if index > 2:
                os.write(1, f"PID {os.getpid()} loader\\n".encode())
                time.sleep(3600)
            return torch.zeros(1)

    @resilient.train(sys.argv[1], every=10**6, max_bandwidth="0.2MB/s", compress="off")
    def main(run):
        os.write(1, f"PID {os.getpid()} rank\\n".encode())
        state = {"w": torch.arange(2_000_000) * 1.7}
        run.track(state=state)
        for _ in run.steps(DataLoader(Slow(), num_workers=1), total=10):
            if run.step == 1:
                run.save().wait(60)
            if run.step == 2:  # which waits for as long as the first one was worth
                run.save().staged.result(60)
                dist.barrier()
                os.write(1, b"STAGED\\n")
                if run.rank:
                    hold_gil()  # native code that lets no other thread run
                dist.barrier()  # hangs
            state["w"].add_(1)

    main()
"""


def wait_for(agent: subprocess.Popen[bytes], log: Path, word: str, times: int) -> str:
    end_s = time.monotonic() + LIMIT_S
    while (text := log.read_text()).count(word) < times:
        assert agent.poll() is None, text
        assert time.monotonic() < end_s, text
        time.sleep(0.02)
    return text


def gone_after_s(pids: list[int], births: list[str]) -> float:
    """Return how long it took until these processes had ended."""
    since_s = time.monotonic()
    while any(started(pid) == born for pid, born in zip(pids, births, strict=True)):
        assert time.monotonic() - since_s < 6 * GONE_WITHIN_S, "there are orphans"
        time.sleep(0.01)
    return time.monotonic() - since_s


def end(agent: subprocess.Popen[bytes], log: Path) -> None:
    """Leave nothing behind, also where what is tested does not work."""
    agent.kill()
    agent.wait()
    for pid in re.findall(r"\d+", " ".join(re.findall(r"PID (.*)", log.read_text()))):
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_workers_are_gone_five_seconds_after_their_agent_and_their_saves_are_committed(
    number: signal.Signals,
    tmp_path: Path,
    count: Callable[[int, int], int],
    figures: Callable[[str, str], Figures],
) -> None:
    told = figures(f"orphans-{number.name}", f"Workers of an agent that {number.name} ended: none is left")
    while len(told) < count(1, 10):
        folder = tmp_path / str(len(told))
        folder.mkdir()
        took_s = _end_agent_in_a_collective(number, folder)
        told.add(workers=RANKS, loader_workers=RANKS, gone_after_s=round(took_s, 3))


def _end_agent_in_a_collective(number: signal.Signals, folder: Path) -> float:
    """Return how long its workers were still there."""
    program, log, place = folder / "program.py", folder / "log", folder / "run"
    program.write_text(textwrap.dedent(TRAINING))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    with log.open("wb") as file:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        agent = subprocess.Popen([*launch, str(program), str(place)], stdout=file, stderr=file, env=environ)
    try:
        wait_for(agent, log, "STAGED", RANKS)
        text = wait_for(agent, log, "loader", RANKS)
        pids = [int(pid) for pid in re.findall(r"PID (\d+)", text)]
        assert len(pids) == 2 * RANKS, text
        births = [started(pid) for pid in pids]
        assert all(births), text
        assert [each.step for each in resilient.checkpoints(place)] == [1], "the save was too quick for this test"
        agent.send_signal(number)
        took_s = gone_after_s(pids, births)
        assert took_s <= GONE_WITHIN_S
        assert agent.wait(LIMIT_S) == -number
        end_s = time.monotonic() + LIMIT_S
        while [each.step for each in resilient.checkpoints(place)] != [2, 1]:
            assert time.monotonic() < end_s, "the writers did not finish the save"
            time.sleep(0.1)
    finally:
        end(agent, log)
    return took_s


AGENT = """
    import os, subprocess, sys, time
    environ = {**os.environ, "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_ERROR_FILE": "/somewhere/0/error.json"}
    subprocess.Popen(sys.argv[1:], env=environ, start_new_session=True)
    time.sleep(3600)
"""

WORKER = """
    import multiprocessing, os, sys, time
    from resilient.clock import SYSTEM_CLOCK
    from resilient.config import read_process
    from resilient.run import orphans

    if "blind" in sys.argv:
        orphans._die_with_parent = lambda: None  # as on a system that has no such thing
    if "late" in sys.argv:
        print("PID", os.getpid(), flush=True)
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.01)
        orphans._ADOPTERS |= {orphans._name(os.getppid())}  # whatever it is called on this machine
    orphans.end_with_agent(read_process(), SYSTEM_CLOCK)
    orphans.end_with_agent(read_process(), SYSTEM_CLOCK)
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=time.sleep, args=(3600,), daemon=True) for _ in range(2)]
    for child in children:
        child.start()
    print("PID", os.getpid(), *(child.pid for child in children), flush=True)
    time.sleep(3600)
"""


@pytest.mark.parametrize("how", ["direct", "blind", "wrapped", "late"])
def test_a_worker_and_what_it_forked_end_with_the_agent(how: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    worker = [sys.executable, "-c", textwrap.dedent(WORKER), how]
    wrapper = ["sh", "-c", '"$@"; true', "sh"] if how == "wrapped" else []  # which the agent's end does not end
    with log.open("wb") as file:
        agent = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(AGENT), *wrapper, *worker], stdout=file, stderr=file
        )
    try:
        pids = [int(pid) for pid in re.findall(r"\d+", wait_for(agent, log, "\n", 1).partition("\n")[0])]
        assert len(pids) == (1 if how == "late" else 3), log.read_text()
        births = [started(pid) for pid in pids]
        time.sleep(1.2)  # two looks, at which the agent lives
        assert [started(pid) for pid in pids] == births
        agent.kill()
        agent.wait()
        assert gone_after_s(pids, births) <= GONE_WITHIN_S
    finally:
        end(agent, log)


def test_a_process_that_no_agent_started_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    worker = [sys.executable, "-c", textwrap.dedent(WORKER), "direct"]
    with log.open("wb") as file:
        agent = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(AGENT).replace("TORCHELASTIC_", ""), *worker],
            stdout=file,
            stderr=file,
        )
    try:
        wait_for(agent, log, "\n", 1)
        (pid, *_) = (int(pid) for pid in re.findall(r"\d+", log.read_text()))
        born = started(pid)
        agent.kill()
        agent.wait()
        time.sleep(1.5)
        assert started(pid) == born
    finally:
        end(agent, log)
