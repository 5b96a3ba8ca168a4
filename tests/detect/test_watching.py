"""The watcher process sees for real what it promises: an end at once, silence soon, a hang when it is one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest

from resilient.detect import proc
from resilient.detect.words import JOURNAL, Ended, Entry, Gone, Hung, Symptom, Word, decode_lines
from tests.figures import Figures

W = TypeVar("W", bound=Word)

INTERVAL_S, FLOOR_S = 0.5, 4.0
PROGRAM = Path(__file__).with_name("watched_rank.py")


class Rank:
    """A watched process, its watcher, and since when (on the monotonic clock) it does what it was told."""

    def __init__(self, folder: Path, how: str, interval_s: float = INTERVAL_S, floor_s: float = FLOOR_S) -> None:
        folder.mkdir()
        self.folder = folder
        command = [sys.executable, str(PROGRAM), str(folder), str(interval_s), str(floor_s), how]
        with (folder.parent / "errors").open("wb") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        assert self.process.stdout is not None
        said, watcher, since = self.process.stdout.readline().split()
        assert said == b"hanging"
        self.watcher, self.since_s = int(watcher), float(since)

    def journal(self) -> list[Entry]:
        with suppress(FileNotFoundError):
            return decode_lines((self.folder / f"{JOURNAL}0").read_bytes())
        return []

    def await_word(self, kind: type[W], timeout_s: float = 30.0) -> tuple[float, W]:
        """Return the first word of a kind, and how many seconds after `since_s` it was said."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            for entry in self.journal():
                if isinstance(entry.word, kind):
                    return entry.at_s - self.since_s, entry.word
            time.sleep(0.05)
        raise AssertionError(f"no {kind.__name__} within {timeout_s} s: {self.journal()}")

    def errors(self) -> str:
        return (self.folder.parent / "errors").read_text()


@contextmanager
def rank(folder: Path, how: str, **settings: float) -> Iterator[Rank]:
    found = Rank(folder, how, **settings)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait()
        assert found.process.stdout is not None
        found.process.stdout.close()
        end = time.monotonic() + 30
        while proc.state(found.watcher) not in ("", "Z"):
            assert time.monotonic() < end, "the watcher outlives its rank"
            time.sleep(0.02)


@pytest.mark.proof
def test_a_process_that_is_killed_is_seen_to_be_gone_within_a_second(
    tmp_path: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    kept = figures("gone", "SIGKILL of a rank until its watcher has seen it, in seconds; the interval is 1 s")
    for number in range(len(kept), count(3, 20)):
        with rank(tmp_path / str(number), "wait", interval_s=1.0) as one:
            one.since_s = time.monotonic()
            one.process.kill()
            seen_s, gone = one.await_word(Gone)
            assert seen_s <= 1.0
            assert (gone.section, gone.step) == ("step", 20)
            kept.add(seen_s=round(seen_s, 4))


@pytest.mark.proof
@pytest.mark.parametrize("how", ["stop", "hold"])
def test_silence_is_a_symptom_within_three_intervals_and_a_hang_only_after_the_timeout(
    how: str, tmp_path: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    title = f"{'SIGSTOP' if how == 'stop' else 'a held interpreter lock'}: seconds until symptom and hang"
    kept = figures(f"silent-{how}", f"{title}; the interval is {INTERVAL_S} s, the timeout {FLOOR_S} s")
    for number in range(len(kept), count(2, 20)):
        with rank(tmp_path / str(number), "hold" if how == "hold" else "wait") as one:
            if how == "stop":
                time.sleep(0.2)
                one.since_s, began_s = time.monotonic(), one.since_s
                os.kill(one.process.pid, signal.SIGSTOP)
            else:
                began_s = one.since_s
            symptom_s, symptom = one.await_word(Symptom)
            assert symptom_s <= 3 * INTERVAL_S
            assert symptom.kind == ("stopped" if how == "stop" else "silent")
            hung_s, hung = one.await_word(Hung)
            hung_s += one.since_s - began_s
            assert FLOOR_S <= hung_s <= FLOOR_S + 3 * INTERVAL_S
            assert (hung.cause, hung.cause_section, hung.step) == (0, "step", 20)
            assert "rank 0 hangs in step" in one.errors()
            if how == "stop":
                assert "the process is stopped" in hung.why
            kept.add(symptom_s=round(symptom_s, 3), hang_s=round(hung_s, 3))


def test_a_step_that_holds_the_lock_for_four_intervals_is_no_hang(tmp_path: Path) -> None:
    with rank(tmp_path / "rank", "hold-a-while") as one:
        assert one.process.wait(60) == 0
        assert one.process.stdout is not None
        assert int(one.process.stdout.read()) >= 2, "the symptoms were not told to the rank itself"
        assert not one.folder.exists(), "what a planned end leaves"
    assert one.errors() == ""
    with rank(tmp_path / "again", "wait") as one:
        learned = (tmp_path / "learned").read_text()
        assert '"step"' in learned, "the next life of this rank knows nothing"


def test_a_rank_that_hangs_is_ended_only_where_that_is_wanted_and_after_its_stacks_are_kept(tmp_path: Path) -> None:
    with rank(tmp_path / "rank", "restart", floor_s=1.0) as one:
        assert one.process.wait(30) == -signal.SIGABRT
        one.await_word(Gone)
        kinds = [type(entry.word) for entry in one.journal()]
        assert kinds.index(Hung) < kinds.index(Ended) < kinds.index(Gone)
        assert one.errors().count("rank 0 is ended") == 1


def test_a_watcher_takes_little_memory(tmp_path: Path) -> None:
    with rank(tmp_path / "rank", "wait") as one:
        status = Path(f"/proc/{one.watcher}/status").read_text()
        (resident,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")]
        assert resident < 24 << 10, "in KiB: it has loaded what it does not need yet"
