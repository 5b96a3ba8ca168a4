"""All checks together: on this machine for real, and with checks that hang, crash, raise and print."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resilient.check import across, suite
from resilient.check.context import Level
from resilient.check.result import Result, Status, failed, passed, skipped, worst
from resilient.check.suite import CHECKS, TIMEOUT_S, Check, run_checks
from tests.figures import Figures

DEADLINE_S: dict[Level, float] = {"light": 60.0, "full": 600.0}


def faulty(name: str, timeout_s: float = 20.0) -> Check:
    return Check(name=name, module=f"tests.check.faulty_{name}", light_s=timeout_s, full_s=timeout_s)


def processes() -> str:
    """Return the commands of all processes."""
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


WELL = Check(name="shared-memory", module="resilient.check.shared_memory", light_s=20, full_s=20)


@pytest.mark.proof
@pytest.mark.parametrize("level", ["light", "full"])
def test_a_level_takes_its_time_and_leaves_nothing_behind(
    level: Level, tmp_path: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    """Light within 60 s, full within 10 minutes, also on this machine while it is busy."""
    if level == "full" and not count(0, 1):
        pytest.skip("takes half a minute: with --full")
    rounds = figures(f"node-check-{level}", f"the wall time of `resilient check --level {level}`")
    begun: list[str] = []
    start = time.monotonic()
    results = run_checks(level, places=[str(tmp_path / "run")], progress=lambda name, _done, _total: begun.append(name))
    wall_s = time.monotonic() - start
    assert wall_s < DEADLINE_S[level]
    rounds.add(wall_s=round(wall_s, 1), results=len(results))
    assert begun == [check.name for check in CHECKS]
    found = {result.name: result for result in results}
    # What this machine's own state does not decide: exactness, the place, space.
    for name in ("processor", "disk", "store", "store bandwidth", "ports", "/dev/shm"):
        assert found[name].status in {Status.OK, Status.SLOW}, found[name]
    assert ("memory patterns" in found) == (level == "full")
    assert all(result.line and result.node for result in results)
    assert all(result.remedy for result in results if result.status in {Status.FAILED, Status.SLOW})
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_file()] == []


def test_the_full_level_looks_deeper(tmp_path: Path) -> None:
    store = Check(name="store", module="resilient.check.place", light_s=60, full_s=60)
    names = {
        level: {each.name for each in run_checks(level, places=[str(tmp_path)], checks=[store])} for level in DEADLINE_S
    }
    assert names["full"] - names["light"] == {"store promises"}


def test_a_check_that_hangs_is_ended_and_the_others_go_on() -> None:
    start = time.monotonic()
    results = run_checks(checks=[WELL, faulty("hang", 1.0), WELL])
    assert time.monotonic() - start < 20
    assert [result.status for result in results] == ["ok", "failed", "ok"]
    assert results[1].name == "hang"
    assert results[1].line == "did not end in 1 s, and was ended"
    time.sleep(0.1)
    assert "a child of the check that hangs" not in processes(), "what the check had started ends with it"


def test_a_check_that_crashes_raises_or_prints_is_no_more_than_a_result() -> None:
    results = run_checks(checks=[faulty("crash"), faulty("raise"), faulty("print"), WELL])
    assert [result.status for result in results] == ["failed", "failed", "ok", "ok"]
    assert "its process ended with SIGSEGV" in results[0].line
    assert "RuntimeError: the device is gone" in results[1].line


def test_what_a_level_has_no_time_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TIMEOUT_S, "light", 0.5)
    results = run_checks(checks=[faulty("hang", 60.0), WELL])
    assert [result.status for result in results] == ["failed", "skipped"]


def test_a_worker_ends_with_the_process_that_started_it() -> None:
    program = (
        "from tests.check.test_suite import faulty; from resilient.check.suite import run_checks;"
        "run_checks(checks=[faulty('hang', 100.0)], progress=lambda *_: print('begun', flush=True))"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "begun\n"
    workers: list[int] = []
    end = time.monotonic() + 20
    while not workers and time.monotonic() < end:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        workers = [int(pid) for pid in children]
        time.sleep(0.05)
    time.sleep(1.0)  # until it hangs
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(10)
    parent.stdout.close()
    while any(Path(f"/proc/{pid}").exists() for pid in workers) or "a child of the check that hangs" in processes():
        assert time.monotonic() < end + 10, "the worker has stayed, or what it has started"
        time.sleep(0.05)


def test_the_deadlines_of_a_level_keep_its_promise() -> None:
    assert TIMEOUT_S["light"] < DEADLINE_S["light"]
    assert TIMEOUT_S["full"] + across._TIMEOUT_S < DEADLINE_S["full"]
    assert suite.CHECKS == CHECKS


def test_the_worst_result_counts() -> None:
    slow = Result(name="a", status=Status.SLOW, line="")
    assert worst([]) is Status.OK
    assert worst([passed("a", ""), skipped("b", "")]) is Status.OK
    assert worst([passed("a", ""), slow]) is Status.SLOW
    assert worst([failed("b", "", ""), slow]) is Status.FAILED
