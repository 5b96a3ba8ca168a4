"""Every rank saves the same steps, by the word of rank 0 and without a collective."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pytest

from resilient.clock import SYSTEM_CLOCK
from resilient.engine.peers import Peers, _OwnMemory
from resilient.errors import ErrorKind, PeerError
from resilient.policy.interval import SaveContext, SaveWhen
from resilient.run import schedule as schedule_module
from resilient.run.schedule import Schedule, schedule_for


class HandClock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.time_s, UTC)

    def monotonic(self) -> float:
        return self.time_s

    def sleep(self, duration_s: float) -> None:
        self.time_s += duration_s


class Job:
    """Ranks that take steps together; between two steps they come to the boundary in any order."""

    def __init__(self, policy: SaveWhen, size: int, *, seed: int = 0, silent: bool = False) -> None:
        self.clock = HandClock()
        self.random = random.Random(seed)
        self.skipped: list[tuple[int, int, str]] = []
        self.saved: list[tuple[int, float]] = []
        self.in_flight: tuple[int, float] | None = None  # on rank 0: the step, and when it is over
        values = _OwnMemory()
        self.ranks = [self._rank(policy, Peers(rank, size, values), rank) for rank in range(size)]
        self.step = 0
        self.last_s = 0.0
        for rank in self.ranks[1:] if silent else self.ranks:
            rank.start(0)

    def _rank(self, policy: SaveWhen, peers: Peers, rank: int) -> Schedule:
        clock = self.clock if rank == 0 else SYSTEM_CLOCK
        return schedule_for(
            policy, peers, topic="t", clock=clock, skipped=lambda step, why: self.skipped.append((rank, step, why))
        )

    def take_step(self, step_s: float, save_s: float = 0.0) -> list[bool]:
        self.clock.time_s += step_s
        self.step += 1
        if self.in_flight is not None and self.in_flight[1] <= self.clock.time_s:
            self.in_flight = None
        context = SaveContext(step=self.step, since_save_s=self.clock.time_s - self.last_s)
        order = list(range(len(self.ranks)))
        self.random.shuffle(order)
        due = {}
        for rank in order:
            # Another rank may see the save as over, or not: only what rank 0 sees counts.
            in_flight = self.in_flight[0] if self.in_flight and (rank == 0 or self.random.random() < 0.5) else None
            due[rank] = self.ranks[rank].due(context, in_flight)
        assert len(set(due.values())) == 1, f"step {self.step}: {due}"
        if due[0]:
            self.saved.append((self.step, self.clock.time_s))
            self.in_flight = (self.step, self.clock.time_s + save_s)
            self.last_s = self.clock.time_s
        return list(due.values())

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


POLICIES = [
    SaveWhen(steps=1),
    SaveWhen(steps=7),
    SaveWhen(seconds=5),
    SaveWhen(seconds=0.001),
    SaveWhen(steps=10) | SaveWhen(seconds=3),
    SaveWhen(steps=1) | SaveWhen(seconds=3),
    SaveWhen(auto=True),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("size", [1, 3])
def test_all_ranks_save_the_same_steps(policy: SaveWhen, size: int) -> None:
    seed = 20260701
    job, draw = Job(policy, size, seed=seed), random.Random(seed)
    print("seed", seed)
    for _ in range(400):
        job.take_step(draw.choice([0.01, 0.3, 0.3, 2.0]), save_s=draw.choice([0.0, 1.0, 20.0]))
    job.close()
    assert job.saved
    assert all(rank == 0 for rank, _, _ in job.skipped)
    over = dict.fromkeys(step for step, _ in job.saved)
    assert not over.keys() & {step for _, step, why in job.skipped if "in flight" in why and policy.step_based}


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_policy_saves_exactly_its_steps_when_the_store_keeps_up(size: int) -> None:
    job = Job(SaveWhen(steps=5), size)
    for _ in range(23):
        job.take_step(0.1)
    job.close()
    assert [step for step, _ in job.saved] == [5, 10, 15, 20]
    assert not job.skipped


@pytest.mark.field_report("BR-042")
@pytest.mark.parametrize("size", [1, 2])
def test_a_save_that_is_due_while_one_is_in_flight_is_left_out_and_said(size: int) -> None:
    job = Job(SaveWhen(steps=5), size)
    for _ in range(20):
        job.take_step(1.0, save_s=8.0)
    job.close()
    assert [step for step, _ in job.saved] == [5, 15]
    assert [(step, why) for _, step, why in job.skipped] == [
        (10, "the save of step 5 is still in flight"),
        (20, "the save of step 15 is still in flight"),
    ]


@pytest.mark.parametrize("step_s", [0.01, 0.5, 4.0])
def test_a_timed_save_comes_within_two_horizons(step_s: float) -> None:
    job = Job(SaveWhen(seconds=10), 2)
    for _ in range(int(100 / step_s)):
        job.take_step(step_s)
    job.close()
    gaps = [after - before for (_, before), (_, after) in zip(job.saved, job.saved[1:], strict=False)]
    assert gaps
    assert all(10 <= gap <= 10 + 2 + 5 * step_s for gap in gaps), gaps


@pytest.mark.parametrize("policy", [SaveWhen(steps=2), SaveWhen(seconds=1)], ids=repr)
@pytest.mark.field_report("BR-057")
def test_a_silent_rank_0_costs_one_bounded_wait_and_is_named(policy: SaveWhen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_module, "_NEWS_TIMEOUT_S", 0.2)
    job = Job(policy, 2, silent=True)
    started_s = SYSTEM_CLOCK.monotonic()
    decisions = [job.ranks[1].due(SaveContext(step=step, since_save_s=0.0), None) for step in range(1, 9)]
    assert 0.2 <= SYSTEM_CLOCK.monotonic() - started_s < 2
    job.close()
    assert not any(decisions)
    assert all("rank 0 has not said" in why for _, _, why in job.skipped)
    assert [step for _, step, _ in job.skipped] == ([2, 4, 6, 8] if policy.step_based else [1])


@pytest.mark.parametrize("policy", [SaveWhen(steps=2), SaveWhen(seconds=1)], ids=repr)
@pytest.mark.field_report("BR-057")
def test_a_key_value_store_that_is_gone_hurts_no_step(policy: SaveWhen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_module, "_NEWS_TIMEOUT_S", 0.2)
    job = Job(policy, 2)

    def gone(*_: object) -> bool:
        raise PeerError("the store is gone", kind=ErrorKind.PEER_FAILED)

    monkeypatch.setattr(_OwnMemory, "set", gone)
    monkeypatch.setattr(_OwnMemory, "check", gone)
    for _ in range(20):
        job.take_step(1.0)
    job.close()
    assert not job.saved
    assert job.skipped
