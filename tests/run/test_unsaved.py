"""G4: a store that goes away leaves training as it was; what is not saved is said, and bounded."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import resilient
from resilient.errors import ErrorKind, StoreError
from resilient.run.saved import Saved
from resilient.run.session import Run
from resilient.store.memory import MemoryStore
from tests.lives import Life


class Away(MemoryStore):
    """A store that takes no data while ``away``."""

    away = False

    def put(self, key: str, parts: Any) -> None:
        if self.away and key.startswith("data/"):
            raise StoreError("the disk is full", kind=ErrorKind.NO_SPACE)
        super().put(key, parts)


def train(store: Away, during: Callable[[Run], None], total: int, **settings: Any) -> torch.Tensor:
    """Train so many steps, saving by hand alone; return what was trained."""
    state = {"w": torch.zeros(1)}

    @resilient.train(store, every=10**6, **settings)
    def main(run: Run) -> None:
        run.track(state=state)
        for _ in run.steps(range(total), total=total):
            during(run)
            state["w"] += 1

    main()
    return state["w"]


@pytest.mark.field_report("BR-142")
def test_each_failure_is_counted_and_saves_go_on_when_the_store_is_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "resilient")
    store = Away()

    def during(run: Run) -> None:
        store.away = 3 <= run.step < 6
        error = run.save().committed.exception(30)
        assert (error is not None) == store.away

    assert train(store, during, 10) == 10
    failed = [line for line in caplog.messages if "training goes on" in line]
    assert [line.partition(":")[0] for line in failed] == [
        "the save of step 3 failed, training goes on",
        "the save of step 4 failed (2 in a row), training goes on",
        "the save of step 5 failed (3 in a row), training goes on",
    ]
    assert caplog.messages[-1] == ("done: 10 steps, now at step 10; the newest committed step is 10 (3 saves failed)")


@pytest.mark.field_report("BR-142")
def test_a_run_whose_newest_committed_state_is_too_old_ends_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Away()
    now = _clock(monkeypatch)

    def during(run: Run) -> None:
        store.away = run.step >= 2
        if run.step in (1, 4):
            run.save().committed.exception(30)
        now[0] += 100.0

    with pytest.raises(StoreError, match=r"nothing was saved for 600 s; the newest committed step is 1") as caught:
        train(store, during, 100, max_unsaved="550s", max_failed_saves=1000)
    assert caught.value.kind is ErrorKind.SAVE_FAILED
    assert "max_unsaved" in str(caught.value.hint)
    assert "the disk is full" in str(caught.value.__cause__)


def test_an_old_state_is_no_alarm_as_long_as_no_save_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    now = _clock(monkeypatch)

    def during(run: Run) -> None:
        now[0] += 100.0
        if run.step == 40:
            run.save().wait(30)  # after an hour, and it goes well

    assert train(Away(), during, 50, max_unsaved="10min") == 50


def _clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let the budget read a clock that the test moves; everything else keeps its own."""
    now = [0.0]

    class Moved:
        def monotonic(self) -> float:
            return now[0]

    def moved(*args: Any, **how: Any) -> Saved:
        return Saved(*args, **{**how, "clock": Moved()})

    monkeypatch.setattr("resilient.run.session.Saved", moved)
    return now


GONE_AT, MORE = 20, 200


def train_while_the_store_goes(place: str, back_at: int | None, notes: str) -> None:
    run_folder, aside = Path(place), Path(place + ".aside")
    state = {"w": torch.zeros(4)}

    @resilient.train(place, every=10, max_failed_saves=10_000, commit_timeout_s=4)
    def main(run: Run) -> None:
        run.track(state=state)
        for _ in run.steps(range(GONE_AT + MORE), total=GONE_AT + MORE):
            if run.step == GONE_AT:
                run.save().wait(60)
                run_folder.rename(aside)
                run_folder.write_text("what was mounted here is gone")
            if run.step == back_at:
                run_folder.unlink()
                aside.rename(run_folder)
            state["w"] += 1
            Path(notes).write_text(str(run.step + 1))

    main()


@pytest.mark.timeout(300)
def test_a_store_that_fails_for_good_costs_no_step_and_the_end_says_since_when_nothing_was_saved(
    tmp_path: Path,
) -> None:
    place, notes = tmp_path / "run", tmp_path / "steps"
    life = Life(1, tmp_path / "logs", train_while_the_store_goes, str(place), None, str(notes))
    (code,) = life.wait(200)
    log = life.output(20_000)
    assert notes.read_text() == str(GONE_AT + MORE), log
    assert code == 3, log
    assert f"done: {GONE_AT + MORE} steps, now at step {GONE_AT + MORE}; nothing was saved since step {GONE_AT}" in log
    assert "saves failed" in log or "save failed" in log
    place.unlink()
    shutil.move(str(place) + ".aside", place)
    assert resilient.checkpoints(place)[0].step == GONE_AT


@pytest.mark.timeout(300)
def test_a_store_that_was_away_for_a_while_has_the_last_step_in_the_end(tmp_path: Path) -> None:
    place, notes = tmp_path / "run", tmp_path / "steps"
    life = Life(1, tmp_path / "logs", train_while_the_store_goes, str(place), GONE_AT + 150, str(notes))
    life.succeed(200)
    assert resilient.checkpoints(place)[0].step == GONE_AT + MORE
