"""A save outlives its trainer, and its writer's death costs that save only: real processes, killed for real."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import resilient
from resilient.catalog.line import read_line
from resilient.events import SaveFailed
from resilient.store.open import open_store
from tests.figures import Figures
from tests.lives import Life, writers_of

NUMEL = 4_000_000


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 90.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.01)


def is_committed(url: str, step: int) -> bool:
    return [each.step for each in read_line(open_store(url)).commits] == [step]


def is_without_writer(trainer: int) -> bool:
    return not writers_of(trainer)


def train_and_stage(url: str, folder: str, stop_at: int) -> None:
    """Count up in every element; save at ``stop_at`` without waiting for the commit, say so, and be killed."""
    rank = os.environ["RANK"]
    notes = Path(folder)

    @resilient.train(url, every=10**6)
    def main(run: resilient.Run) -> None:
        w = torch.zeros(NUMEL)
        restored = run.track(state={"w": w})
        (notes / f"restored-{rank}").write_text(str(restored.step if restored else 0))
        (notes / f"value-{rank}").write_text(str(float(w.min())))
        assert w.min() == w.max()
        for _ in run.steps(range(10**6), total=10**6):
            if run.step == stop_at:
                run.save().staged.result(60)
                (notes / f"staged-{rank}").write_text(str(os.getpid()))
                time.sleep(600)
            w.add_(1)

    main()


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "notes"
    folder.mkdir()
    yield folder
    for note in folder.glob("staged-*"):
        for pid in writers_of(int(note.read_text())):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.field_report("BR-177")
@pytest.mark.proof
@pytest.mark.timeout(1500)
def test_a_save_commits_although_its_trainer_is_killed_right_after_staged(
    tmp_path: Path, notes: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    tries = figures("orphaned-saves", "The trainer killed right after `staged`: the save commits all the same")
    total = count(2, 20)
    for number in range(len(tries), total):
        url = str(tmp_path / f"run-{number}")
        life = Life(1, tmp_path / f"life-{number}", train_and_stage, url, str(notes), 3)
        wait_until((notes / "staged-0").exists, "staged")
        life.kill()
        wait_until(partial(is_committed, url, 3), "the commit")
        back = {"w": torch.zeros(NUMEL)}
        resilient.load(url, {"state": back})
        assert bool((back["w"] == 3).all())
        trainer = int((notes / "staged-0").read_text())
        wait_until(partial(is_without_writer, trainer), "the end of the writer", 15)
        (notes / "staged-0").unlink()
        tries.add(committed=3)
    assert len(tries) == total


@pytest.mark.proof
@pytest.mark.timeout(1500)
def test_a_restart_continues_from_what_was_staged_when_all_ranks_were_killed(
    tmp_path: Path, notes: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    """The writers stand still until the next life has begun: it must wait for them, not take the older step."""
    tries = figures(
        "restarts-on-staged", "Two ranks killed right after `staged` and restarted at once: that step is restored"
    )
    total = count(1, 20)
    for number in range(len(tries), total):
        url = str(tmp_path / f"run-{number}")
        first = Life(2, tmp_path / f"first-{number}", train_and_stage, url, str(notes), 3)
        wait_until(lambda: len(list(notes.glob("staged-*"))) == 2, "staged on both ranks")
        trainers = [int(each.read_text()) for each in notes.glob("staged-*")]
        writers = [pid for trainer in trainers for pid in writers_of(trainer)]
        for pid in writers:
            os.kill(pid, signal.SIGSTOP)
        first.kill()
        for note in notes.iterdir():
            note.unlink()
        second = Life(2, tmp_path / f"second-{number}", train_and_stage, url, str(notes), 5)
        try:
            time.sleep(1.0)
            for pid in writers:
                os.kill(pid, signal.SIGCONT)
            wait_until(lambda: len(list(notes.glob("staged-*"))) == 2, "staged by the second life")
            assert [(notes / f"restored-{rank}").read_text() for rank in range(2)] == ["3", "3"]
            assert [(notes / f"value-{rank}").read_text() for rank in range(2)] == ["3.0", "3.0"]
        finally:
            second.kill()
        for note in notes.iterdir():
            note.unlink()
        tries.add(restored=3)
    assert len(tries) == total


@pytest.mark.field_report("BR-051")
def test_a_writer_that_is_killed_costs_the_save_that_it_has_in_hand_and_nothing_else(tmp_path: Path) -> None:
    failed: list[SaveFailed] = []
    others = set(writers_of(os.getpid()))

    @resilient.train(tmp_path / "run", every=10**6, max_failed_saves=3)
    def main(run: resilient.Run) -> None:
        run._bus.subscribe(lambda event: failed.append(event) if isinstance(event, SaveFailed) else None)
        state = {"w": torch.zeros(16 * NUMEL)}
        run.track(state=state)
        for _ in run.steps(range(6), total=6):
            if run.step == 2:
                (pid,) = set(writers_of(os.getpid())) - others
                handle = run.save()
                handle.staged.result(60)
                os.kill(pid, signal.SIGKILL)
                with pytest.raises(resilient.ResilientError, match="SIGKILL"):
                    handle.wait(60)
            if run.step == 4:
                run.save().wait(60)
            state["w"].add_(1)

    main()
    assert [event.step for event in failed] == [2]
    assert [each.step for each in resilient.checkpoints(tmp_path / "run")] == [6, 4]
