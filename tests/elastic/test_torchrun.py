"""A job that was stopped ends with 75, one that failed does not, whoever was told to stop and by which signal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import resilient
from resilient.catalog.process import started
from resilient.elastic.torchrun import is_done, wants_requeue

LIMIT_S = 120.0
PROGRAM = """
    import os, signal, sys, time, resilient

    @resilient.train(sys.argv[1])
    def main(run):
        run.track(state={"n": 0})
        stops = []
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: stops.append(number))
        os.write(1, f"READY {os.getpid()}\\n".encode())
        while not stops:
            time.sleep(0.01)
        os.write(1, f"STOPPED BY {signal.Signals(stops[0]).name}\\n".encode())
        end = time.monotonic() + 2  # for which it would save
        while time.monotonic() < end:
            time.sleep(0.01)
        if run.rank == 0 and "fail" in sys.argv:
            raise ValueError("not in the middle of this")
        sys.exit(75)

    main()
"""


TRAINING = """
    import os, sys, time, torch, resilient

    @resilient.train(sys.argv[1], every=10**6)
    def main(run):
        state = {"n": torch.zeros(1)}
        run.track(state=state)
        for _ in run.steps(range(10**9), total=int(sys.argv[2])):
            state["n"] += 1
            time.sleep(0.02)
            os.write(1, f"STEP {run.step + 1}\\n".encode())  # in one piece

    main()
"""


@pytest.fixture(autouse=True)
def hears_when_its_terminal_goes() -> Iterator[None]:
    """Let what is started here hear SIGHUP, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@contextmanager
def job(
    tmp_path: Path, *arguments: str, code: str = PROGRAM, flags: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text(textwrap.dedent(code))
    command = [sys.executable, "-m", "resilient.cli.main", "run", "--nproc-per-node=2", *flags]
    with log.open("wb") as file:
        launched = subprocess.Popen(
            [*command, str(program), str(tmp_path / "run"), *arguments],
            stdout=file,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        yield launched, log
    finally:
        launched.kill()
        launched.wait()


def wait_for(launched: subprocess.Popen[bytes], log: Path, word: str, times: int) -> str:
    end_s = time.monotonic() + LIMIT_S
    while (text := log.read_text()).count(word) < times:
        assert launched.poll() is None, text
        assert time.monotonic() < end_s, text
        time.sleep(0.02)
    return text


@pytest.mark.parametrize(
    ("number", "heard", "arguments", "code"),
    [(signal.SIGUSR1, signal.SIGUSR1, (), 75), (signal.SIGHUP, signal.SIGTERM, ("fail",), 1)],
    ids=["USR1", "a rank fails"],
)
def test_a_notice_to_the_launcher_reaches_the_workers_and_its_exit_code_is_theirs(
    number: signal.Signals, heard: signal.Signals, arguments: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    with job(tmp_path, *arguments) as (launched, log):
        text = wait_for(launched, log, "READY", 2)
        workers = [int(pid) for pid in re.findall(r"READY (\d+)", text)]
        launched.send_signal(number)
        wait_for(launched, log, "STOPPED", 2)
        for _ in range(3):  # as a scheduler does that has lost its patience
            launched.terminate()
            time.sleep(0.2)
        assert launched.wait(LIMIT_S) == code, log.read_text()
        text = log.read_text()
        assert text.count(f"STOPPED BY {heard.name}") == 2
        assert not any(started(pid) for pid in workers)
        assert ("SignalException" in text) == (code != 75)  # a traceback says that something is wrong
        assert ("asks to be started again" in text) == (code == 75)


def test_a_training_that_was_told_to_stop_goes_on_where_it_was_on_another_size(tmp_path: Path) -> None:
    store = f"--store={tmp_path / 'run'}"
    with job(tmp_path, "1000000", code=TRAINING, flags=(store,)) as (launched, log):
        wait_for(launched, log, "STEP", 20)
        launched.send_signal(signal.SIGUSR1)
        assert launched.wait(LIMIT_S) == 75, log.read_text()
        steps = [int(step) for step in re.findall(r"STEP (\d+)", log.read_text())]
    assert resilient.checkpoints(tmp_path / "run")[0].step == max(steps), "a step is lost"
    with job(tmp_path, str(max(steps) + 5), code=TRAINING, flags=(store, "--nproc-per-node=1")) as (launched, log):
        assert launched.wait(LIMIT_S) == 0, log.read_text()
        assert f"resumed at step {max(steps)}" in log.read_text()


def test_a_notice_before_there_are_workers_asks_to_be_started_again(tmp_path: Path) -> None:
    with job(tmp_path) as (launched, log):
        status = Path(f"/proc/{launched.pid}/status")
        end_s = time.monotonic() + LIMIT_S
        usr1 = 1 << (signal.SIGUSR1 - 1)
        while not int(re.findall(r"SigCgt:\s*(\w+)", status.read_text())[0], 16) & usr1:  # as soon as it has a handler
            assert time.monotonic() < end_s
            time.sleep(0.005)
        launched.send_signal(signal.SIGUSR1)
        assert launched.wait(LIMIT_S) == 75, log.read_text()
        assert "stopped by SIGUSR1 before the workers were started" in log.read_text()


@pytest.mark.parametrize(
    ("notes", "signalled", "verdict"),
    [
        (["75", "75"], True, True),
        (["75", "75"], False, True),  # resilient stop
        (["75", "0"], True, True),  # one was done
        (["0", "0"], True, False),
        ([], True, True),  # they had not begun
        ([], False, False),
        (["75", ""], True, False),  # one was ended by force
        (["75", "1"], True, False),
        (["3", "75"], True, False),
    ],
)
def test_who_asks_to_be_started_again(notes: list[str], signalled: bool, verdict: bool) -> None:
    assert wants_requeue(notes, signalled=signalled) is verdict


def test_a_job_that_was_done_all_the_same_is_done() -> None:
    assert is_done(["0", "0"])
    assert not is_done([])
    assert not is_done(["0", ""])
    assert not is_done(["0", "75"])


def test_what_the_rendezvous_refuses_is_said_without_a_traceback(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    command = [
        str(Path(sys.executable).with_name("resilient")),
        "run",
        "--store",
        "s3://",
        "--nodes",
        "1:2",
        str(script),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 2, done.stderr
    assert "s3:// wants a bucket" in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
