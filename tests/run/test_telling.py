"""A run writes down what happens beside its checkpoints, and never waits for that."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import resilient
from resilient import events
from resilient.catalog.generations import newest_claim
from resilient.catalog.journals import Journal, read_journals
from resilient.clock import SYSTEM_CLOCK
from resilient.errors import ErrorKind, StoreError
from resilient.format import layout
from resilient.format.digest import BytesLike
from resilient.observe.journal import Journal as Queue
from resilient.report.account import read_ledger
from resilient.report.model import End, Part
from resilient.run import telling
from resilient.run.promised import Promised
from resilient.run.sections import Counter, NoMarks, Sections
from resilient.store.base import Store
from resilient.store.forwarding import Forwarding
from resilient.store.open import open_store
from tests.run.looks import Opened, settings_with

LIMIT_S = 60.0


class JournalsAway(Forwarding):
    """A store in which a journal hangs until it is back, and fails then; ``asked`` once somebody has tried."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.asked, self.back = threading.Event(), threading.Event()
        self.held_up = False

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        if key.startswith(layout.JOURNALS) and not self.back.is_set():
            self.asked.set()
            self.held_up = not self.back.wait(LIMIT_S)
            raise StoreError("away", kind=ErrorKind.UNREACHABLE)
        super().put(key, parts)


def journal_of(store: Store) -> Journal:
    claim = newest_claim(store)
    assert claim is not None
    return read_journals(store, claim.generation, claim.nonce)[0]


def taken(journal: Journal) -> list[events.StepsTaken]:
    return [each.event for each in journal.records if isinstance(each.event, events.StepsTaken)]


def test_all_steps_are_told_in_few_lines_and_the_account_adds_up(tmp_path: Path) -> None:
    @resilient.train(tmp_path, every=50, journal_every_s=0.25)
    def main(run: resilient.Run) -> None:
        run.track(state={"x": torch.zeros(3)})
        for _ in run.steps(range(300), total=300):
            time.sleep(0.004)

    main()
    journal = journal_of(open_store(tmp_path))
    reports = taken(journal)
    assert sum(each.steps for each in reports) >= 299, "the turn in which the loop is left ends it"
    assert 3 <= len(reports) <= 40
    assert all(each.turn_s >= 0.004 * each.steps for each in reports)
    ledger = read_ledger(open_store(tmp_path), clock=SYSTEM_CLOCK)
    assert ledger.step == 300
    assert ledger.generations[0].end is End.DONE
    assert [save.step for save in ledger.saves if save.commit_s is not None][-1] == 300
    assert sum(ledger.parts.values()) == pytest.approx(ledger.wall_s, abs=1e-3)
    assert ledger.parts[Part.COMPUTE] >= 300 * 0.004 - 0.1
    assert ledger.missing == ()


def test_a_run_whose_last_step_is_not_saved_has_not_ended_as_planned(tmp_path: Path) -> None:
    @resilient.train(tmp_path, every=10, journal_every_s=0.1)
    def main(run: resilient.Run) -> None:
        state = {"x": torch.zeros(3)}
        run.track(state=state)
        for _ in run.steps(range(35), total=35):
            time.sleep(0.002)
            state["x"] += 1
        (tmp_path / "data").rename(tmp_path / "away")
        (tmp_path / "data").touch()  # from now on the place takes no data

    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3
    ledger = read_ledger(open_store(tmp_path), clock=SYSTEM_CLOCK)
    assert ledger.generations[0].end is End.FAILED
    assert ledger.stakes, "what would be lost is known"


def test_who_listens_hears_of_steps_all_the_time_and_an_old_life_writes_them_down_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telling, "_AGING", 1e3)  # as if this life were months old
    said: list[events.Event] = []

    @resilient.train(tmp_path, every=10**6, journal_every_s=0.1, observers=(said.append,))
    def main(run: resilient.Run) -> None:
        run.track(state={"x": torch.zeros(3)})
        for _ in run.steps(range(600), total=600):
            time.sleep(0.004)

    main()
    heard = [event for event in said if isinstance(event, events.StepsTaken)]
    assert len(heard) >= 4
    (written,) = taken(journal_of(open_store(tmp_path)))
    assert written.steps == sum(event.steps for event in heard)
    assert written.turn_s == pytest.approx(sum(event.turn_s for event in heard), abs=1e-4)
    assert written.ended_s == pytest.approx(heard[-1].ended_s, abs=1e-3)


def test_a_store_that_takes_no_journals_holds_nothing_up_and_gets_them_later(tmp_path: Path) -> None:
    store = JournalsAway(open_store(tmp_path))
    said: list[events.Event] = []

    @resilient.train(store, every=10**6, journal_every_s=0.1, observers=(said.append,))
    def main(run: resilient.Run) -> None:
        run.track(state={"x": torch.zeros(3)})
        for step in run.steps(range(100), total=100):
            if step == 50:
                assert store.asked.wait(LIMIT_S), "nobody writes a journal"
            elif step == 90:  # forty steps with the journal hanging: training that waited for it would not come here
                store.back.set()

    main()
    assert not store.held_up
    told = [each.message for each in said if isinstance(each, events.Notice) and "does not take it" in each.message]
    assert len(told) == 1, "once"
    journal = journal_of(open_store(tmp_path))
    assert sum(each.steps for each in taken(journal)) >= 99
    names = [type(each.event) for each in journal.records]
    assert events.GenerationStarted in names, "what came while the store was away"


def test_how_the_training_function_was_left_is_written_down(tmp_path: Path) -> None:
    @resilient.train(tmp_path, every=10**6)
    def main(run: resilient.Run) -> None:
        run.track(state={"x": torch.zeros(3)})
        for step in run.steps(range(9)):
            if step == 5:
                raise ValueError("no label")

    with pytest.raises(ValueError, match="no label"):
        main()
    ended = [each.event for each in journal_of(open_store(tmp_path)).records if isinstance(each.event, events.Ended)]
    assert ended == [events.Ended(step=5, how="failed", error="ValueError: no label")]
    ledger = read_ledger(open_store(tmp_path), clock=SYSTEM_CLOCK)
    assert [one.failure for one in ledger.incidents] == ["user-error"]


def test_a_fall_below_the_promise_is_told_once(tmp_path: Path) -> None:
    store = open_store(tmp_path)

    @resilient.train(tmp_path, every=10**6, sla=0.999)
    def main(run: resilient.Run) -> None:
        run.track(state={"x": torch.zeros(3)})
        for _ in run.steps(range(3)):
            time.sleep(0.01)

    main()
    said: list[events.Event] = []
    bus = events.Bus()
    bus.subscribe(said.append)
    clock = Hurrying()
    promised = Promised(Opened(store), settings_with(sla=0.999), bus=bus, clock=clock)  # type: ignore[arg-type]
    promised.look(clock.monotonic())
    assert not said, "too early to say anything"
    for _ in range(3):
        clock.ahead_s += 1000.0
        promised.look(0.0)
    looks = [each for each in said if isinstance(each, events.ShareLooked)]
    assert len(looks) == 3, "each look is told"
    assert all(each.promised == 0.999 and 0 <= each.delivered < 0.999 for each in looks)
    (missed,) = (each for each in said if not isinstance(each, events.ShareLooked))
    assert isinstance(missed, events.ShareMissed)
    assert (missed.promised, missed.largest) == (0.999, "start-up")
    assert 0 <= missed.delivered < 0.999
    assert "imports" in missed.message, "what to do about it"


class Hurrying:
    """The machine's clock, set forward at will."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now(self) -> object:
        return SYSTEM_CLOCK.now()

    def monotonic(self) -> float:
        return SYSTEM_CLOCK.monotonic() + self.ahead_s

    def sleep(self, duration_s: float) -> None:
        SYSTEM_CLOCK.sleep(duration_s)


def test_counting_and_queueing_cost_a_step_microseconds() -> None:
    def turns_s(sections: Sections) -> float:
        began_s = time.thread_time()
        for _ in sections.turns(lambda: iter(range(20_000)), lambda: 1):
            pass
        return (time.thread_time() - began_s) / 20_000

    counter = Counter()
    counted_s = min(turns_s(Sections(NoMarks(), counter)) for _ in range(5))
    began_s = time.thread_time()
    for _ in range(20_000):
        counter.add(1, 0.1, 0.2)
    add_s = (time.thread_time() - began_s) / 20_000
    queue = Queue(SYSTEM_CLOCK)
    event = events.Notice(message="x")
    began_s = time.thread_time()
    for _ in range(20_000):
        queue(event)
    put_s = (time.thread_time() - began_s) / 20_000
    print(f"counting {1e6 * add_s:.2f} us of {1e6 * counted_s:.2f} us a turn, queueing an event {1e6 * put_s:.2f} us")
    assert add_s < 20e-6
    assert put_s < 50e-6
