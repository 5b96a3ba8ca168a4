"""`every="auto"` in simulated trainings: as good as the best fixed interval, quick to adapt, true to what was asked."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import resilient
from resilient.config import Settings
from resilient.errors import UsageError
from resilient.events import Bus, Event, Notice, SaveCommitted, SaveFenced, SaveStarted
from resilient.policy.interval import SaveWhen, auto_interval
from resilient.policy.planning.choosing import choose
from resilient.run.pace import Pace
from tests.figures import Figures


class HandClock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.time_s, UTC)

    def monotonic(self) -> float:
        return self.time_s

    def sleep(self, duration_s: float) -> None:
        self.time_s += duration_s


def pace_for(clock: HandClock, bus: Bus, generation: int = 1, rank: int = 0, **settings: Any) -> Pace:
    opened = SimpleNamespace(
        created=datetime.fromtimestamp(0, UTC).isoformat(),
        claim=SimpleNamespace(generation=generation),
        peers=SimpleNamespace(rank=rank),
    )
    return Pace(cast("Any", opened), Settings(**settings), bus=bus, clock=clock)


class Training:
    """One life: steps of equal length, and saves when the policy says so."""

    def __init__(
        self, clock: HandClock, policy: SaveWhen, *, step_s: float, generation: int = 1, **settings: Any
    ) -> None:
        self.clock, self.policy, self.step_s = clock, policy, step_s
        self.bus = Bus()
        self.told: list[str] = []
        self.bus.subscribe(self._listen)
        self.pace = pace_for(clock, self.bus, generation, **settings)
        self.saves: list[tuple[int, float]] = []  # the step, and when it began
        self.stalled_s = 0.0
        self._step = 0
        self._saved_s = clock.time_s
        self._durable: tuple[int, float] | None = None
        self.newest, self.newest_s = 0, clock.time_s  # what is durable, and from when that is
        self.oldest_s = 0.0  # the greatest age of the newest durable state

    def _listen(self, event: Event) -> None:
        if isinstance(event, Notice):
            self.told.append(event.message)

    def step(self, stall_s: float, persist_s: float, fence_s: float = 0.0) -> None:
        self.clock.time_s += self.step_s
        self._step += 1
        self._settle()
        context = self.pace.context(self._step, saved_s=self._saved_s)
        if not self.policy.due(context) or self._durable is not None:
            return
        began_s = self._saved_s = self.clock.time_s
        self.saves.append((self._step, began_s))
        self.clock.time_s += stall_s
        self.bus.emit(SaveStarted(step=self._step, reason="interval", nbytes=1, stall_s=stall_s))
        if fence_s:
            self.clock.time_s += fence_s
            self.bus.emit(SaveFenced(step=self._step, waited_s=fence_s))
        self.stalled_s += stall_s + fence_s
        self._durable = self._step, began_s + max(persist_s, stall_s)

    def _settle(self) -> None:
        now_s = self.clock.time_s
        if self._durable is None or self._durable[1] > now_s:
            self.oldest_s = max(self.oldest_s, now_s - self.newest_s)
            return
        step, durable_s = self._durable
        self.oldest_s = max(self.oldest_s, durable_s - self.newest_s)
        began_s = self.saves[-1][1]
        self.bus.emit(SaveCommitted(step=step, nbytes=1, duration_s=durable_s - began_s))
        self.newest, self.newest_s, self._durable = step, began_s, None


@dataclass(frozen=True, kw_only=True)
class World:
    """What a training meets with, in seconds."""

    mtbf_s: float
    stall_s: float
    persist_s: float
    recovery_s: float
    step_s: float


def ettr(world: World, policy: SaveWhen, failures: int, seed: int) -> float:
    """Return which share of the time of a run goes into steps that are kept; the same failures for each policy."""
    draw = random.Random(seed)
    clock = HandClock()
    kept, generation = 0, 1
    for _ in range(failures):
        end_s = clock.time_s + draw.expovariate(1 / world.mtbf_s)
        if end_s > clock.time_s + world.recovery_s:
            clock.time_s += world.recovery_s
            life = Training(clock, policy, step_s=world.step_s, generation=generation)
            generation += 1
            while clock.time_s + world.step_s <= end_s:
                life.step(world.stall_s, world.persist_s)
            clock.time_s = max(clock.time_s, end_s)
            life._settle()
            kept += life.newest
        else:
            clock.time_s = end_s
            generation += 1
    return kept * world.step_s / clock.time_s


WORLDS = {
    "often-cheap": World(mtbf_s=1800, stall_s=0.5, persist_s=5, recovery_s=60, step_s=3),
    "often-dear": World(mtbf_s=1800, stall_s=5, persist_s=10, recovery_s=120, step_s=1),
    "often-slow-store": World(mtbf_s=1800, stall_s=1, persist_s=60, recovery_s=60, step_s=1),
    "some": World(mtbf_s=3 * 3600, stall_s=10, persist_s=60, recovery_s=300, step_s=10),
    "rare": World(mtbf_s=24 * 3600, stall_s=30, persist_s=300, recovery_s=600, step_s=60),
}


@pytest.mark.proof
@pytest.mark.parametrize("name", WORLDS)
def test_auto_is_within_0_01_of_the_best_fixed_interval(
    name: str, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    world, seed, failures = WORLDS[name], 20261201, count(30, 400)
    kept = figures(f"auto-{name}", f'every="auto" against the best of fixed intervals, simulated: {world}')
    if len(kept):
        return
    print("seed", seed)
    found = ettr(world, SaveWhen(auto=True), failures, seed)
    best = choose(stall_s=world.stall_s, persist_s=0.0, mtbf_s=world.mtbf_s, budget=0.99).period_s
    tried = {best * factor: 0.0 for factor in (0.35, 0.6, 0.8, 1.0, 1.25, 1.7, 3.0)}
    for seconds in tried:
        tried[seconds] = ettr(world, SaveWhen(seconds=seconds), failures, seed)
    fixed = max(tried.values())
    assert fixed > min(tried.values()) + 0.01, "else any interval would do"
    assert found >= fixed - 0.01
    kept.add(failures=failures, auto=round(found, 4), best_fixed=round(fixed, 4))


def train(training: Training, saves: int, stall_s: float, persist_s: float, fence_s: float = 0.0) -> None:
    until = len(training.saves) + saves
    while len(training.saves) < until:
        training.step(stall_s, persist_s, fence_s)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_auto_adapts_within_10_saves_after_the_cost_changes(factor: float) -> None:
    training = Training(HandClock(), SaveWhen(auto=True), step_s=0.5)
    train(training, 30, 1.0, 4.0)
    train(training, 10, factor * 1.0, factor * 4.0)
    training.step(factor * 1.0, factor * 4.0)
    context = training.pace.context(0, saved_s=training.clock.time_s)
    known = choose(stall_s=factor * 1.0, persist_s=factor * 4.0, mtbf_s=context.mtbf_s)
    assert auto_interval(context) == pytest.approx(known.period_s, rel=0.01)
    before = choose(stall_s=1.0, persist_s=4.0, mtbf_s=context.mtbf_s)
    assert abs(before.period_s - known.period_s) > 0.2 * known.period_s, "there was something to adapt to"


def test_one_save_out_of_line_moves_nothing() -> None:
    training = Training(HandClock(), SaveWhen(auto=True), step_s=0.5)
    train(training, 20, 1.0, 4.0)
    before = auto_interval(training.pace.context(0, saved_s=training.clock.time_s))
    train(training, 1, 60.0, 400.0)
    for _ in range(6):
        train(training, 1, 1.0, 4.0)
        after = auto_interval(training.pace.context(0, saved_s=training.clock.time_s))
        assert after == pytest.approx(before, rel=0.12), "the age of the run alone makes it longer"


def test_what_training_waits_at_the_fence_is_a_cost_of_the_save() -> None:
    training = Training(HandClock(), SaveWhen(auto=True), step_s=0.5)
    train(training, 10, 0.25, 4.0, fence_s=0.75)
    assert training.pace.context(0, saved_s=0).stall_s == pytest.approx(1.0)


@pytest.mark.parametrize("budget", [0.05, 0.01])
def test_saving_stays_under_its_budget_also_where_each_save_costs_something_else(budget: float) -> None:
    seed = 5
    draw = random.Random(seed)
    training = Training(HandClock(), SaveWhen(auto=True), step_s=1.0, generation=200, overhead_budget=budget)
    train(training, 8, 10.0, 12.0)
    began_s, before_s = training.clock.time_s, training.stalled_s
    until = len(training.saves) + 100
    while len(training.saves) < until:
        training.step(10 * draw.choice([0.5, 1.0, 1.0, 1.5, 2.0]), 12.0)
    overhead = (training.stalled_s - before_s) / (training.clock.time_s - began_s)
    assert 0.8 * budget < overhead <= budget, f"seed {seed}: as often as the budget allows, and no more"


@pytest.mark.parametrize("step_s", [0.5, 7.0])
def test_no_state_that_a_failure_leaves_is_older_than_the_objective(step_s: float) -> None:
    training = Training(HandClock(), SaveWhen(auto=True), step_s=step_s, rpo=60.0)
    train(training, 3, 0.5, 10.0)
    training.oldest_s = 0.0
    train(training, 30, 0.5, 10.0)
    assert 45 < training.oldest_s <= 60
    without = Training(HandClock(), SaveWhen(auto=True), step_s=step_s)
    train(without, 33, 0.5, 10.0)
    assert without.oldest_s > 90
    assert training.told == without.told == [], "there is nothing to say"


def test_an_objective_that_cannot_be_met_is_said_once_and_again_when_that_changes() -> None:
    training = Training(HandClock(), SaveWhen(auto=True), step_s=0.5, rpo=30.0)
    train(training, 20, 0.1, 40.0)
    (missed,) = training.told
    assert missed.startswith("rpo: 30 s cannot be met: a failure may leave a state of ")
    assert "saves start 40 s apart" in missed
    train(training, 20, 0.1, 2.0)
    assert training.told[1:] == ["rpo: 30 s is met again, within the budget"]
    train(training, 20, 2.0, 2.0)
    (costly,) = training.told[2:]
    assert "rpo: 30 s is met, and costs " in costly
    assert "more than the budget of 5 %" in costly


def test_only_the_rank_that_decides_says_so() -> None:
    bus, heard = Bus(), list[Event]()
    pace = pace_for(HandClock(), bus, rank=1, rpo=10.0)
    bus.subscribe(heard.append)
    bus.emit(SaveStarted(step=1, reason="interval", nbytes=1, stall_s=1.0))
    bus.emit(SaveCommitted(step=1, nbytes=1, duration_s=60.0))
    assert pace.context(2, saved_s=0.0).persist_s == 60.0
    assert not any(isinstance(event, Notice) for event in heard)


def test_a_real_run_says_what_it_cannot_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resilient.policy.interval.FIRST_SAVE_S", 0.05)
    told: list[str] = []
    committed: list[int] = []

    def listen(event: Event) -> None:
        if isinstance(event, Notice) and event.message.startswith("rpo"):
            told.append(event.message)
        elif isinstance(event, SaveCommitted):
            committed.append(event.step)

    @resilient.train(tmp_path / "run", rpo="500ms")
    def main(run: resilient.Run) -> None:
        run._bus.subscribe(listen)
        run.track(state={"value": 0})
        end_s = time.monotonic() + 60
        numbers = itertools.takewhile(lambda _: len(committed) < 3 and time.monotonic() < end_s, itertools.count())
        for _ in run.steps(numbers):
            time.sleep(0.01)

    main()
    assert len(committed) >= 3
    assert len(told) == 1
    assert told[0].startswith("rpo: 0.5 s cannot be met")
    with pytest.raises(UsageError, match="with every=10: it must be automatic"):
        resilient.train(tmp_path / "run", every=10, rpo="2min")
