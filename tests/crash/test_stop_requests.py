"""G13: whoever is asked to stop, by whatever, in the middle of whatever: one step, saved, nothing lost, in time."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from resilient.catalog.line import read_line
from resilient.catalog.requests import ask
from resilient.catalog.verify import verify
from resilient.clock import SYSTEM_CLOCK
from resilient.elastic.node import Asked, Node
from resilient.store.local import LocalStore
from tests.crash.stopping import train_until_stopped, train_with_slow_saves
from tests.detect.clouds import FakeCloud
from tests.figures import Figures
from tests.lives import Life

PROGRAM = Path(__file__).with_name("stopping.py")
SIZE = 3
GRACE_S = 30.0
PAUSE_S = 0.02
ENDLESS = 10**6
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")


@dataclass(frozen=True)
class Case:
    """``to``: "one" rank, "all", the whole "group" with its loader workers, the "launcher"; what has no choice: ""."""

    source: str
    to: str
    where: str


CASES = [
    *(
        Case(name, to, where)
        for name, to, where in zip(SIGNALS, ("one", "all", "one", "all"), ("", "", "eval", "saving"), strict=True)
    ),
    Case("SIGTERM", "group", "workers"),
    Case("file", "", "eval"),
    Case("node", "", "saving"),
    Case("request", "", ""),
    Case("aws", "", "workers"),
    *(Case(name, "group", "workers") for name in ("SIGINT", "SIGUSR1", "SIGUSR2")),
    Case("gcp", "", "saving"),
    Case("azure", "", "eval"),
    Case("SIGTERM", "one", "saving"),
    Case("SIGTERM", "one", "workers"),
    Case("SIGTERM", "all", "eval"),
    Case("SIGUSR1", "all", ""),
]
SMALL = 5


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.field_report("BR-170", "BR-173")
def test_preemption_is_not_a_loss(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: Callable[[int, int], int],
    figures: Callable[[str, str], Figures],
) -> None:
    told = figures("stop-requests", "Stopped on notice from every source, in every situation: one step, saved, in time")
    rounds = count(SMALL, 40)
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    # Small and quick, each run of the test looks at other cases.
    cases = itertools.cycle(CASES if rounds > SMALL else [CASES[4], *rng.sample(CASES, SMALL - 1)])
    for number, case in enumerate(itertools.islice(cases, len(told), rounds)):
        told.add(**stop_once(case, tmp_path, f"life-{number}", rng, monkeypatch))
    resumed_equals_uninterrupted(tmp_path)


def stop_once(
    case: Case, folder: Path, life: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str | int | float]:
    place = folder / "run"
    with asked_by(case, folder / f"asks-{life}", place, monkeypatch) as send:
        running = Life(
            SIZE, folder / life, train_until_stopped, str(place), str(folder), life, ENDLESS, PAUSE_S, case.where
        )
        try:
            pids = wait_for_steps(running, folder, life, case.where, rng)
            first = int((folder / f"pid-{life}-0").read_text().split()[1])
            started_s = time.monotonic()
            send(pids, rng)
            codes = running.wait(60)
            took_s = time.monotonic() - started_s
        finally:
            running.kill()
    output = running.output()
    steps = {int((folder / f"step-{life}-{rank}").read_text()) for rank in range(SIZE)}
    assert codes == [75] * SIZE, f"{case}: exit codes {codes}\n{output}"
    assert len(steps) == 1, f"{case}: the ranks have done {steps} steps\n{output}"
    (step,) = steps
    newest = read_line(LocalStore(place)).commits[0].step
    assert newest == step, f"{case}: {step} steps are done and {newest} are saved\n{output}"
    assert "saved; start it again" in output, output
    assert took_s < GRACE_S, output
    return {
        "source": case.source,
        "to": case.to,
        "where": case.where,
        "steps": step - first,
        "took_s": round(took_s, 2),
    }


def wait_for_steps(
    running: Life, folder: Path, life: str, where: str, rng: random.Random, *, size: int = SIZE
) -> list[int]:
    """Return the ranks' process ids, at a random moment of their training; of their evaluation, if they have one."""
    end = time.monotonic() + 90
    wanted = [folder / f"step-{life}-{rank}" for rank in range(size)]
    while not all(path.exists() for path in wanted) or (where == "eval" and not list(folder.glob(f"eval-{life}-*"))):
        assert running.alive, running.output()
        assert time.monotonic() < end, running.output()
        time.sleep(0.01)
    if where != "eval":
        time.sleep(rng.uniform(0, 1.0))
    return [int((folder / f"pid-{life}-{rank}").read_text().split()[0]) for rank in range(size)]


@contextmanager
def asked_by(
    case: Case, folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[list[int], random.Random], object]]:
    folder.mkdir()
    with monkeypatch.context() as patch, FakeCloud() as cloud:
        send: Callable[[list[int], random.Random], object]
        match case.source:
            case "file":
                patch.setenv("RESILIENT_STOP_FILE", str(folder / "stop"))
                send = lambda pids, rng: (folder / "stop").touch()
            case "node":
                patch.setenv("RESILIENT_NODE_DIR", str(folder))
                send = lambda pids, rng: Node(folder).ask(Asked(kind="stop", why="the node is drained"))
            case "request":
                send = lambda pids, rng: ask(LocalStore(place), "stop", why="maintenance", clock=SYSTEM_CLOCK)
            case "aws" | "gcp" | "azure":
                patch.setenv("RESILIENT_NOTICES", case.source)
                patch.setenv("RESILIENT_NOTICES_URL", cloud.url)
                send = lambda pids, rng: cloud.preempt(case.source, within_s=25)
            case _:
                send = lambda pids, rng: send_signal(pids, case, rng)
        yield send


def send_signal(pids: list[int], case: Case, rng: random.Random) -> None:
    targets = [rng.choice(pids)] if case.to == "one" else list(pids)
    if case.to == "group":
        children = [child for pid in pids for child in children_of(pid)]
        assert len(children) >= 4 * len(pids), f"the loaders have only {len(children)} workers"
        targets += children
    rng.shuffle(targets)
    for pid in targets:
        os.kill(pid, signal.Signals[case.source])


def children_of(pid: int) -> list[int]:
    """Return the processes that a rank has forked, but not its writer, which has a session of its own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and int(fields[3]) == os.getsid(pid):
                found.append(int(entry.name))
    return found


def resumed_equals_uninterrupted(folder: Path) -> None:
    newest = read_line(LocalStore(folder / "run")).commits[0].step
    total = 10 * (newest // 10 + 2)
    Life(
        SIZE, folder / "last-life", train_until_stopped, str(folder / "run"), str(folder), "last", total, 0.0
    ).succeed()
    Life(
        SIZE, folder / "whole-life", train_until_stopped, str(folder / "whole"), str(folder), "whole", total, 0.0
    ).succeed()
    resumed, whole = np.load(folder / "final-last.npz"), np.load(folder / "final-whole.npz")
    assert sorted(resumed) == sorted(whole)
    for name in whole:
        assert np.array_equal(resumed[name], whole[name]), name


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_a_signal_to_the_launcher_stops_all_its_workers_at_one_step(
    tmp_path: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    told = figures("stop-launcher", "Stopped by a signal to torchrun: one step, saved, in time")
    wheres = itertools.cycle(["workers", "", "eval", "saving"])
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for number, where in enumerate(itertools.islice(wheres, len(told), count(1, 10))):
        folder = tmp_path / str(number)
        folder.mkdir()
        place, log = folder / "run", folder / "log"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        launch += ["--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"]
        with log.open("wb") as file:
            arguments = [str(PROGRAM), str(place), str(folder), "0", str(ENDLESS), str(PAUSE_S), where]
            agent = subprocess.Popen(
                launch + arguments, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        end = time.monotonic() + 120
        while not all((folder / f"step-0-{rank}").exists() for rank in range(2)):
            assert agent.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        time.sleep(rng.uniform(0.0, 1.0))
        name = rng.choice(["SIGTERM", "SIGUSR1"])
        started_s = time.monotonic()
        agent.send_signal(signal.Signals[name])
        agent.wait(60)
        took_s = time.monotonic() - started_s
        text = log.read_text()
        steps = {int((folder / f"step-0-{rank}").read_text()) for rank in range(2)}
        assert len(steps) == 1, text
        assert steps == {read_line(LocalStore(place)).commits[0].step}, text
        assert f"by {name}" in text, text
        assert took_s < GRACE_S, text
        told.add(source=name, to="launcher", where=where, took_s=round(took_s, 2))


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.field_report("BR-169")
def test_a_kill_at_any_moment_of_a_grace_time_that_is_too_short_loses_no_committed_state(
    tmp_path: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    told = figures("grace-kills", "SIGTERM, and SIGKILL at a random moment of a grace time shorter than a save")
    rounds = count(3, 100)
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    place, grace_s, newest = tmp_path / "run", 2.0, 0
    for number in range(rounds - len(told)):
        life = f"life-{number}"
        running = Life(2, tmp_path / life, train_with_slow_saves, str(place), str(tmp_path), life, grace_s, ENDLESS)
        try:
            pids = wait_for_steps(running, tmp_path, life, "", rng, size=2)
            first = int((tmp_path / f"pid-{life}-0").read_text().split()[1])
            assert first >= newest, f"{newest} was committed, and the next start began at {first}\n{running.output()}"
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
            delay_s = rng.uniform(0, grace_s)
            time.sleep(delay_s)
            with_writers = rng.random() < 0.3  # as if the machine had gone
            if with_writers:
                running.kill_with_writers()
        finally:
            running.kill()
        running.wait()
        done = max(int((tmp_path / f"step-{life}-{rank}").read_text()) for rank in range(2))
        newest = max((commit.step for commit in read_line(LocalStore(place)).commits), default=0)
        told.add(
            from_step=first, done=done, committed=newest, killed_after_s=round(delay_s, 3), all_killed=with_writers
        )
    last = Life(2, tmp_path / "last", train_with_slow_saves, str(place), str(tmp_path), "last", grace_s, 0)
    last.succeed()
    assert int((tmp_path / "pid-last-0").read_text().split()[1]) >= newest
    line = read_line(LocalStore(place))
    assert verify(LocalStore(place), line.commits, deep=True, line=line).ok
