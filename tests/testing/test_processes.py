"""What the process kit does to processes is what it says."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from resilient.errors import UsageError
from resilient.testing import processes
from resilient.testing.processes import ProcessFaults, full_dev_shm, full_disk, hog_memory, hold_gil, kill_at_random

WAITER = "import time\nprint('ready', flush=True)\ntime.sleep(60)"


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for child in started:
        with suppress(ProcessLookupError):
            child.kill()
        child.communicate(timeout=30)


def start(children: list[subprocess.Popen[str]], program: str = WAITER) -> subprocess.Popen[str]:
    children.append(subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True))
    assert children[-1].stdout is not None
    assert children[-1].stdout.readline() == "ready\n"
    return children[-1]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def in_state(pid: int, wanted: str) -> bool:
    end = time.monotonic() + 30
    while (now := state(pid)) not in wanted:
        assert time.monotonic() < end, f"in state {now}, not one of {wanted}"
        time.sleep(0.005)
    return True


@pytest.mark.parametrize(("name", "number"), [("kill", signal.SIGKILL), ("segfault", signal.SIGSEGV)])
def test_what_ends_a_process_ends_it_by_that_signal(
    name: str, number: int, children: list[subprocess.Popen[str]]
) -> None:
    child = start(children)
    assert getattr(processes, name)(child)
    assert child.wait(timeout=30) == -number
    assert not getattr(processes, name)(child.pid), "nobody is there any more"


def test_a_stopped_process_lives_and_goes_on_at_the_latest_when_the_kit_is_put_away(
    children: list[subprocess.Popen[str]],
) -> None:
    child = start(children)
    with ProcessFaults() as faults:
        assert faults.stop(child)
        assert in_state(child.pid, "T")
        assert faults.resume(child.pid)
        assert in_state(child.pid, "SR")
        assert faults.stop(child)
        assert in_state(child.pid, "T")
    assert in_state(child.pid, "SR")


def test_all_are_killed_at_a_moment_that_the_seed_chooses(
    children: list[subprocess.Popen[str]], process_faults: ProcessFaults
) -> None:
    group = [start(children), start(children)]
    began = time.monotonic()
    waited_s = process_faults.kill_at_random(group, random.Random(5), within_s=0.2)
    assert waited_s == random.Random(5).uniform(0, 0.2)
    assert time.monotonic() - began >= waited_s
    assert [child.wait(timeout=30) for child in group] == [-signal.SIGKILL] * 2
    assert kill_at_random(group, random.Random(5), within_s=0.001) <= 0.001, "the dead are no error"


@pytest.mark.parametrize("nobody", [0, -1, 1])
def test_no_signal_goes_to_a_group_or_to_init(nobody: int) -> None:
    with pytest.raises(UsageError):
        processes.kill(nobody)


def test_leaving_runs_and_flushes_nothing(children: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    child = start(
        children,
        "from resilient.testing import leave\nprint('ready', flush=True)\n"
        f"file = open({str(kept)!r}, 'w')\nfile.write('lost')\ntry:\n    leave(7)\nfinally:\n    print('never')",
    )
    assert child.communicate(timeout=60)[0] == ""
    assert kept.read_text() == ""
    assert child.returncode == 7


def test_a_held_interpreter_runs_no_thread_and_a_hanging_thread_lets_others_run() -> None:
    ticks = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.005):
            ticks.append(time.monotonic())

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        processes.hang(0.3)
        while_hanging = len(ticks)
        began = time.monotonic()
        hold_gil(0.5)
        ended = time.monotonic()
        while_held = sum(began + 0.05 < tick < ended - 0.05 for tick in ticks)
    finally:
        done.set()
        ticker.join()
    assert while_hanging >= 3
    assert ended - began >= 0.5
    assert while_held == 0


def test_hogged_memory_is_resident_and_given_back() -> None:
    def resident_nbytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = resident_nbytes()
    with hog_memory(100 << 20):
        assert resident_nbytes() > before + (90 << 20)
    assert resident_nbytes() < before + (50 << 20)
    with pytest.raises(MemoryError), hog_memory(1 << 62):
        pass


def test_a_full_disk_is_full_and_gone_afterwards() -> None:
    with full_disk(1 << 20) as disk:
        (disk.path / "small").write_bytes(b"x" * 1_000)
        with pytest.raises(OSError) as caught:
            (disk.path / "large").write_bytes(b"x" * (2 << 20))
        assert caught.value.errno == (errno.ENOSPC if disk.how == "mount" else errno.EFBIG)
    assert not disk.path.exists()


def test_without_the_right_to_mount_a_limit_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_mount", lambda *_: False)
    with full_disk(1 << 20) as disk:
        assert disk.how == "limit"
        (disk.path / "small").write_bytes(b"x" * 1_000)
        with pytest.raises(OSError) as caught:
            (disk.path / "large").write_bytes(b"x" * (2 << 20))
        assert caught.value.errno == errno.EFBIG
        with pytest.raises(UsageError):
            disk.fill()
    assert not disk.path.exists()
    monkeypatch.setattr(processes, "_call", lambda *_: False)
    with pytest.raises(UsageError, match="CAP_SYS_ADMIN"), full_dev_shm(1 << 16):
        pass


def may_mount() -> bool:
    with full_disk(1 << 16) as disk:
        return disk.how == "mount"


def test_a_disk_is_filled_and_cleared_again() -> None:
    if not may_mount():
        pytest.skip("this process may not mount")
    with full_disk(1 << 20) as disk:
        disk.fill(but_nbytes=64 << 10)
        (disk.path / "fits").write_bytes(b"x" * (32 << 10))
        with pytest.raises(OSError) as caught:
            (disk.path / "does not").write_bytes(b"x" * (64 << 10))
        assert caught.value.errno == errno.ENOSPC
        disk.clear()
        (disk.path / "does").write_bytes(b"x" * (64 << 10))


def test_a_small_dev_shm_is_seen_by_this_thread_and_its_children_alone() -> None:
    if not may_mount():
        pytest.skip("this process may not mount")
    total = "import os; state = os.statvfs('/dev/shm'); print(state.f_blocks * state.f_frsize)"

    def seen_here() -> int:
        state = os.statvfs("/dev/shm")
        return state.f_blocks * state.f_frsize

    outside = seen_here()
    started_before: list[int] = []
    look, looked = threading.Event(), threading.Event()

    def elsewhere() -> None:
        look.wait(30)
        started_before.append(seen_here())
        looked.set()

    threading.Thread(target=elsewhere).start()
    with full_dev_shm(1 << 20):
        assert seen_here() == 1 << 20
        said = subprocess.run([sys.executable, "-c", total], capture_output=True, text=True, check=True).stdout
        assert int(said) == 1 << 20
        look.set()
        looked.wait(30)
        # One that lives on must not keep this thread from going back.
        threading.Thread(target=time.sleep, args=(0.5,)).start()
    assert seen_here() == outside
    assert started_before == [outside]
