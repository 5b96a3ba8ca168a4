"""All ranks stop at one step, whichever of them is asked and whenever, however far apart they are."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from resilient.clock import SYSTEM_CLOCK
from resilient.engine.peers import Peers, _OwnMemory
from resilient.errors import ErrorKind, PeerError
from resilient.run.stop_agreement import Ask, StopAgreement, Word

STEPS = 300


class Job:
    """Ranks as threads: one trains, one looks. ``collective``: no rank ends a step before all have begun it."""

    def __init__(self, size: int, *, collective: bool, seed: int, timeout_s: float = 10.0) -> None:
        self.random = random.Random(seed)
        self.told: list[str] = []
        self.values = _OwnMemory()
        self.agreements = [
            StopAgreement(
                Peers(rank, size, self.values), "t", SYSTEM_CLOCK, notice=self.told.append, timeout_s=timeout_s
            )
            for rank in range(size)
        ]
        self.wanted: list[Ask | None] = [None] * size
        self.stopped: dict[int, int] = {}
        self.ended = threading.Event()
        self.barrier = threading.Barrier(size) if collective else None
        self.errors: list[BaseException] = []

    def ask(self, rank: int, why: str = "SIGTERM") -> None:
        self.wanted[rank] = Ask("stop", why, rank)

    def run(self, during: Callable[[Job, int], object], *, start: int = 0, deaf: tuple[int, ...] = ()) -> None:
        """Train until all have stopped, or have done all their steps; ``during`` is called in each step of rank 0."""
        looking = [
            threading.Thread(target=self._look, args=(rank,))
            for rank in range(len(self.agreements))
            if rank not in deaf
        ]
        training = [
            threading.Thread(target=self._train, args=(rank, start, during)) for rank in range(len(self.agreements))
        ]
        for thread in [*looking, *training]:
            thread.start()
        for thread in training:
            thread.join(60)
            assert not thread.is_alive(), "a rank waits for ever"
        self.ended.set()
        for thread in looking:
            thread.join(10)
        assert not self.errors

    def _look(self, rank: int) -> None:
        draw = random.Random(self.random.random())
        while not self.ended.is_set():
            self.agreements[rank].look(self.wanted[rank])
            time.sleep(draw.choice([0.0, 0.001, 0.005]))

    def _train(self, rank: int, step: int, during: Callable[[Job, int], object]) -> None:
        draw = random.Random(self.random.random())
        self.agreements[rank].start(step)
        try:
            for _ in range(STEPS):
                word = self.agreements[rank].depart(step)
                if word is not None:
                    self.stopped[rank] = step
                    return
                if rank == 0:
                    during(self, step)
                time.sleep(draw.choice([0.0, 0.0, 0.001]))
                if self.barrier is not None:
                    self.barrier.wait(20)
                time.sleep(draw.choice([0.0, 0.0, 0.001]))
                step += 1
        except threading.BrokenBarrierError as error:
            self.errors.append(error)


@pytest.mark.parametrize("collective", [True, False])
@pytest.mark.field_report("BR-173")
def test_whoever_is_asked_whenever_all_ranks_stop_at_one_step(collective: bool) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(40):
        size, at = draw.randint(2, 5), draw.randrange(60)
        askers = draw.sample(range(size), draw.randint(1, size))
        job = Job(size, collective=collective, seed=draw.randrange(2**32))

        def ask(job: Job, step: int, at: int = at, askers: list[int] = askers) -> None:
            if step == at:
                for rank in askers:
                    job.ask(rank)

        job.run(ask)
        assert len(job.stopped) == size, (at, askers, job.stopped)
        assert len(set(job.stopped.values())) == 1, (at, askers, job.stopped)
        if collective:  # then the ranks are at most one step apart
            assert job.stopped[0] >= at + 1
        assert not job.told


def test_one_rank_stops_after_the_turn_that_goes_on() -> None:
    job = Job(1, collective=False, seed=0)
    agreement = job.agreements[0]
    agreement.start(7)
    assert agreement.depart(7) is None
    agreement.look(Ask("stop", "SIGTERM", 0))
    word = agreement.depart(8)
    assert word is not None
    assert (word.step, word.ask.why) == (8, "SIGTERM")
    assert agreement.depart(9) is word  # what could not be saved at 8 stops at the next one


def test_a_stop_before_the_first_turn_costs_none() -> None:
    job = Job(3, collective=False, seed=0)
    job.ask(1)
    for agreement in job.agreements:
        agreement.start(4)
    for _ in range(3):
        for rank, agreement in enumerate(job.agreements):
            agreement.look(job.wanted[rank])
    words = [agreement.depart(4) for agreement in job.agreements]
    assert [word and word.step for word in words] == [4, 4, 4]


@pytest.mark.field_report("BR-057")
def test_a_rank_that_says_nothing_is_named_and_training_goes_on() -> None:
    job = Job(3, collective=True, seed=1, timeout_s=0.3)
    job.run(lambda job, step: job.ask(1) if step == 3 else None, deaf=(2,))
    assert not job.stopped
    assert len([told for told in job.told if "rank 2 has not said" in told]) >= 1, job.told


def test_after_a_round_without_agreement_the_next_one_may_agree() -> None:
    job = Job(2, collective=False, seed=1, timeout_s=0.05)
    first, second = job.agreements
    first.start(0)
    second.start(0)
    job.ask(0)
    end = time.monotonic() + 10
    while not job.told:  # the second is busy, and looks at nothing
        first.look(job.wanted[0])
        assert time.monotonic() < end
    assert first.depart(0) is None
    assert second.depart(0) is None
    while first.word is None or second.word is None:
        first.look(job.wanted[0])
        second.look(None)
        assert time.monotonic() < end
    assert first.word == second.word
    assert first.word.step == 1


def test_a_store_that_is_gone_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(2, collective=False, seed=1)
    first = job.agreements[0]
    first.start(0)
    job.ask(0)
    first.look(job.wanted[0])
    assert first.busy

    def gone(*_: object) -> bool:
        raise PeerError("the store is gone", kind=ErrorKind.PEER_FAILED)

    monkeypatch.setattr(_OwnMemory, "check", gone)
    with pytest.raises(PeerError):
        first.look(job.wanted[0])
    started_s = time.monotonic()
    assert first.depart(0) is None
    assert time.monotonic() - started_s < 1


def test_rank_0_gives_up_in_time_also_while_it_reads_what_many_have_said(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(50, collective=False, seed=1, timeout_s=0.2)
    first = job.agreements[0]
    first.start(0)
    check = _OwnMemory.check

    def slow(values: _OwnMemory, keys: list[str]) -> bool:
        time.sleep(0.02)
        return check(values, keys)

    job.ask(1)
    job.agreements[1].look(job.wanted[1])
    for rank, agreement in enumerate(job.agreements[1:], 1):
        agreement.start(0)
        agreement.look(job.wanted[rank])
    monkeypatch.setattr(_OwnMemory, "check", slow)
    started_s = time.monotonic()
    first.look(None)
    assert time.monotonic() - started_s < 0.8, "they wait for so long"
    assert not first.busy, "it has said that there is no word"
    assert len(job.told) == 1


def test_no_step_is_named_once_a_rank_has_gone_on() -> None:
    job = Job(2, collective=False, seed=1, timeout_s=0.1)
    first, second = job.agreements
    first.start(0)
    second.start(0)
    assert second.depart(0) is None
    job.ask(1)
    second.look(job.wanted[1])
    assert second.depart(1) is None, "rank 0 is frozen"
    assert second.depart(2) is None
    first.look(None)
    second.look(None)
    assert first.word is None
    assert second.word is None
    assert any("rank 1 has given up" in told for told in job.told)


def test_who_sees_that_rank_0_is_settling_waits_for_its_word() -> None:
    job = Job(2, collective=False, seed=1, timeout_s=0.1)
    first, second = job.agreements
    first.start(0)
    second.start(0)
    assert second.depart(0) is None
    job.ask(1)
    second.look(job.wanted[1])
    Peers(0, 2, job.values).publish("t/0/settling", b"")
    timer = threading.Timer(0.3, lambda: second._hear(Word(1, Ask("stop", "SIGTERM", 1))))
    timer.start()
    word = second.depart(1)
    timer.join()
    assert word is not None
    assert word.step == 1
