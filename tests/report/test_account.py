"""The account of runs made by hand, whose truth is known."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import resilient
from resilient import events
from resilient.catalog.journals import read_journals
from resilient.clock import SYSTEM_CLOCK
from resilient.errors import NotFoundError
from resilient.events import Event
from resilient.format import layout
from resilient.report.account import read_ledger
from resilient.report.model import PRODUCTIVE, End, Ledger, Part
from resilient.report.slices import life_of, sum_of
from resilient.store.memory import MemoryStore
from resilient.store.open import open_store
from tests.catalog.runs import HandClock
from tests.report.histories import BEGAN_S, History, nonce


def read(history: History) -> Ledger:
    return read_ledger(history.store, clock=HandClock())


def taken(at_s: float, step: int, steps: int, turn_s: float, data_s: float = 0.0, save_s: float = 0.0) -> Event:
    return events.StepsTaken(
        step=step, steps=steps, turn_s=turn_s, data_s=data_s, save_s=save_s, ended_s=BEGAN_S + at_s
    )


def started(generation: int, resumed: int | None = None) -> Event:
    return events.GenerationStarted(url="memory:", generation=generation, world_size=1, resumed_step=resumed)


def close(parts: dict[Part, float]) -> object:
    return pytest.approx({part: seconds for part, seconds in parts.items() if seconds}, abs=2e-3)


def a_failure_and_a_restart(launch: str = "a") -> History:
    """Two lives: 10 s of start, a first step of 5 s, steps of 1 s to step 30; back to step 20 after a failure."""
    history = History()
    one = history.claim(4.0, launch="a")
    records: list[tuple[float, Event]] = [(9.0, started(one)), (15.0, taken(15.0, 1, 1, 5.0))]
    records += [(15.0 + 5 * n, taken(15.0 + 5 * n, 1 + 5 * n, 5, 4.5, 0.5, 0.5)) for n in range(1, 6)]
    history.journal(one, 0.0, records)
    history.failed(one, 44.0, step=30)
    two = history.claim(55.0, launch=launch, resumed=(20, one))
    restored = events.Restored(step=20, generation=one, saved_world_size=1, nbytes_read=7, duration_s=3.0)
    more: list[tuple[float, Event]] = [(59.0, restored), (60.0, started(two, 20)), (63.0, taken(63.0, 21, 1, 1.0))]
    more += [(63.0 + 5 * n, taken(63.0 + 5 * n, 21 + 5 * n, 5, 5.0)) for n in range(1, 3)]
    more += [(75.0, events.Ended(step=31, how="done", error=""))]
    history.journal(two, 50.0, more, launch=launch)
    return history


def test_a_failure_costs_what_is_lost_and_all_that_comes_between() -> None:
    ledger = read(a_failure_and_a_restart())
    one, two = ledger.generations
    # Of five seconds 0.5 s were saving: steps 21 to 26 have taken 0.9 s each, as those in the last 4 s have.
    assert one.parts[Part.LOST] == pytest.approx(0.9 * 6 + 0.9 * 4.0, abs=1e-3)
    assert one.parts[Part.START] == pytest.approx(10.0 + 5.0 - 0.9, abs=1e-3)
    assert (one.began_s, one.ended_s) == (BEGAN_S, BEGAN_S + 44.0)
    assert (one.end, two.end) == (End.FAILED, End.DONE)
    assert (one.kept_step, two.kept_step, two.resumed_step, ledger.step) == (20, None, 20, 31)
    assert two.parts[Part.START] == pytest.approx(12.0 - 3.0)
    assert two.parts[Part.RESTORE] == pytest.approx(3.0)
    (incident,) = ledger.incidents
    assert (incident.at_s, incident.failure, incident.rank) == (BEGAN_S + 44.0, "user-error", 0)
    assert incident.parts[Part.REFORMATION] == pytest.approx(6.0)
    assert incident.cost_s == pytest.approx(one.parts[Part.LOST] + 6.0 + two.parts[Part.START] + 3.0)
    assert incident.lost_steps == 10
    assert incident.resumed_step == 20
    assert sum(ledger.parts.values()) == pytest.approx(ledger.wall_s)


def test_between_two_launches_nothing_runs() -> None:
    ledger = read(a_failure_and_a_restart(launch="b"))
    assert ledger.parts[Part.IDLE] == pytest.approx(6.0)
    assert Part.REFORMATION not in ledger.parts


def test_a_life_without_a_journal_is_accounted_for_and_named() -> None:
    history = a_failure_and_a_restart()
    history.store.delete(layout.journal(1, nonce(1), 0, "events", 0))
    ledger = read(history)
    assert ledger.generations[0].parts == close({Part.START: 40.0})
    assert ledger.began_s == BEGAN_S + 4.0
    assert any("generation 1 has written no journal" in each for each in ledger.missing)
    assert sum(ledger.parts.values()) == pytest.approx(ledger.wall_s)


def test_a_torn_line_is_passed_over_and_counted() -> None:
    history = a_failure_and_a_restart()
    key = layout.journal(2, nonce(2), 0, "events", 0)
    history.store.put(key, [history.store.get(key)[:-20]])
    ledger = read(history)
    assert any("1 lines of its journals cannot be read" in each for each in ledger.missing)
    assert sum(ledger.parts.values()) == pytest.approx(ledger.wall_s)


def test_going_back_behind_an_earlier_life_takes_from_that_one_too() -> None:
    history = History()
    for number, (resumed, last) in enumerate([(None, 10), ((10, 1), 20), ((5, 1), 12)]):
        begin = 20.0 * number
        claim = history.claim(begin, resumed=resumed)
        step = 0 if resumed is None else resumed[0]
        records = [(begin, started(claim, step or None))]
        records += [(begin + n - step, taken(begin + n - step, n, 1, 1.0)) for n in range(step + 1, last + 1)]
        history.journal(claim, begin, records)
        if number < 2:
            history.failed(claim, begin + last - step)
    ledger = read(history)
    assert [one.parts.get(Part.LOST, 0.0) for one in ledger.generations] == pytest.approx([5.0, 10.0, 0.0], abs=1e-3)
    assert [one.kept_step for one in ledger.generations] == [5, 5, None]
    assert ledger.incidents[1].parts[Part.LOST] == pytest.approx(15.0, abs=1e-3), "the second failure has cost both"


def test_one_process_that_trains_twice_was_idle_in_between() -> None:
    history = History()
    for number in range(2):
        begin = 100.0 * number
        claim = history.claim(begin + 10.0, launch=f"{number}", resumed=None if number == 0 else (10, 1))
        records = [
            (begin + 20.0, taken(begin + 20.0, 10 * (number + 1), 10, 10.0)),
            (begin + 21.0, events.Ended(step=10 * (number + 1), how="done", error="")),
        ]
        history.journal(claim, 5.0, records, pid=7, began_s=begin + 9.0, launch=f"{number}")
    ledger = read(history)
    assert ledger.parts[Part.IDLE] == pytest.approx(109.0 - 21.0, abs=2e-3)
    assert ledger.wall_s == pytest.approx(121.0 - 5.0, abs=2e-3)


def test_what_is_computed_is_split_by_the_pictures_of_steps() -> None:
    history = History()
    claim = history.claim(0.0)
    picture = events.StepPicture(
        step=9, steps=3, step_s=1.0, compute_s=0.3, exchange_s=0.4, data_s=0.2, optimizer_s=0.1, save_s=0.0
    )
    steps = [(float(n), taken(float(n), n, 1, 1.0, 0.2)) for n in range(1, 11)]
    history.journal(claim, 0.0, [*steps, (10.0, picture), (10.0, events.Ended(step=10, how="done", error=""))])
    ledger = read(history)
    assert ledger.parts == close({Part.COMPUTE: 4.0, Part.EXCHANGE: 4.0, Part.DATA: 2.0})
    assert len(ledger.pictures) == 1


def test_the_promise_is_compared_with_what_was_delivered() -> None:
    history = History()
    claim = history.claim(0.0)
    history.journal(claim, 0.0, [(50.0, taken(50.0, 1, 1, 1.0)), (60.0, taken(60.0, 11, 10, 10.0))], sla=0.95)
    promise = read(history).promise
    assert promise is not None
    assert (promise.promised, promise.largest) == (0.95, Part.START)
    assert promise.delivered == pytest.approx(11 / 60, abs=0.01)
    assert "start-up" in promise.message


def test_where_nothing_has_begun_there_is_nothing_to_account_for() -> None:
    with pytest.raises(NotFoundError):
        read_ledger(MemoryStore(), clock=HandClock())


seconds = st.floats(0.0, 500.0).map(lambda value: round(value, 3))
some_event = st.one_of(
    st.builds(events.StepsTaken, step=st.integers(0, 500), steps=st.integers(0, 50), turn_s=seconds, data_s=seconds,
              save_s=seconds, ended_s=st.just(0.0) | seconds.map(lambda at: BEGAN_S + at)),
    st.builds(events.Restored, step=st.integers(0, 500), generation=st.just(1), saved_world_size=st.just(2),
              nbytes_read=st.just(1), duration_s=seconds),
    st.builds(events.RestoreStarted, step=st.integers(0, 500), generation=st.just(1), nonce=st.just("")),
    st.builds(events.SaveStarted, step=st.integers(0, 500), reason=st.sampled_from(["interval", "end", "stop"]),
              nbytes=st.just(1), stall_s=seconds),
    st.builds(events.StepPicture, step=st.just(1), steps=st.just(1), step_s=seconds, compute_s=seconds,
              exchange_s=seconds, data_s=seconds, optimizer_s=seconds, save_s=seconds),
    st.builds(events.Ended, step=st.integers(0, 500), how=st.sampled_from(["done", "stopped", "failed"]),
              error=st.just("")),
    st.builds(started, st.just(1), st.none() | st.integers(0, 500)),
)  # fmt: skip
a_life = st.fixed_dictionaries(
    {
        "claimed": seconds,
        "launch": st.sampled_from("ab"),
        "journals": st.lists(st.tuples(seconds, st.lists(st.tuples(seconds, some_event), max_size=8)), max_size=3),
        "failures": st.lists(st.tuples(seconds, st.integers(0, 2)), max_size=2),
        "resumed": st.none() | st.tuples(st.integers(0, 500), st.integers(1, 3)),
        "based": st.booleans(),
    }
)


@settings(max_examples=150, deadline=None)
@given(st.lists(a_life, min_size=1, max_size=4))
def test_the_parts_sum_to_the_wall_clock_whatever_the_ranks_have_written(lives: list[dict[str, object]]) -> None:
    history = History()
    for life in lives:
        told: list[tuple[float, list[tuple[float, Event]]]] = life["journals"]  # type: ignore[assignment]
        number = history.claim(
            life["claimed"], ranks=3, launch=life["launch"], resumed=life["resumed"], based=life["based"]  # type: ignore[arg-type]
        )  # fmt: skip
        for rank, (began_s, records) in enumerate(told):
            in_order = sorted(records, key=lambda each: each[0])
            history.journal(number, began_s, in_order, rank=rank, ranks=3, launch=str(life["launch"]))
        for rank, at_s in {rank: at_s for at_s, rank in life["failures"]}.items():  # type: ignore[attr-defined]
            history.failed(number, at_s, rank=rank, ranks=3)
    assume(any(life["journals"] or life["failures"] for life in lives))
    ledger = read(history)
    assert sum(ledger.parts.values()) == pytest.approx(ledger.wall_s, abs=1e-4)
    assert all(value >= 0 for value in ledger.parts.values())
    for one in ledger.generations:
        assert sum(one.parts.values()) == pytest.approx(one.ended_s - one.began_s, abs=1e-4)
        assert all(value >= 0 for value in one.parts.values())
    for before, after in pairwise(ledger.generations):
        assert before.ended_s <= after.began_s
    for incident in ledger.incidents:
        assert all(value >= 0 and math.isfinite(value) for value in incident.parts.values())
    assert all(0 <= share <= 1 for _, share in ledger.ettr_hours)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_history_that_adds_up_is_told_as_it_was(data: st.DataObject) -> None:
    draw = data.draw
    history, truth, now, kept = History(), dict.fromkeys(Part, 0.0), 0.0, 0
    lives = draw(st.integers(1, 4))
    step_s = draw(st.sampled_from([0.125, 0.5, 2.0]))
    begins = 0.0
    for number in range(1, lives + 1):
        start_s, restore_s = draw(st.integers(1, 30)), draw(st.integers(1, 9)) if number > 1 else 0
        excess_s, each_s = draw(st.integers(0, 20)), draw(st.sampled_from([0.0, 0.25]))
        reports, size = draw(st.integers(2, 12)), draw(st.integers(1, 8))
        begins, resumed = now, kept
        claim = history.claim(now, resumed=(resumed, number - 1) if number > 1 else None)
        now += start_s + restore_s
        records: list[tuple[float, Event]] = []
        if restore_s:
            restored = events.Restored(step=resumed, generation=number - 1, saved_world_size=1, nbytes_read=1,
                                       duration_s=restore_s)  # fmt: skip
            records.append((now, restored))
        records.append((now, started(claim, resumed if number > 1 else None)))
        now += step_s + excess_s
        step = resumed + 1
        records.append((now, taken(now, step, 1, step_s + excess_s)))
        for _ in range(reports):
            step += size
            now += size * step_s + each_s
            records.append((now, taken(now, step, size, size * step_s, 0.25 * size * step_s, each_s)))
        truth[Part.START] += start_s + excess_s
        truth[Part.RESTORE] += restore_s
        truth[Part.SAVE] += reports * each_s
        last = number == lives
        if last:
            records.append((now, events.Ended(step=step, how="done", error="")))
        made = step - resumed
        kept = step if last else resumed + 1 + draw(st.integers(0, step - resumed - 1))
        truth[Part.DATA] += 0.25 * step_s * max(0, kept - resumed - 1)
        truth[Part.COMPUTE] += step_s * (kept - resumed) - 0.25 * step_s * max(0, kept - resumed - 1)
        truth[Part.LOST] += step_s * (made - (kept - resumed))
        history.journal(claim, begins, records)
        if not last:
            detection_s, gap_s = draw(st.integers(1, 20)), draw(st.integers(1, 50))
            history.failed(claim, now, step=step)
            history.failed(claim, now + detection_s, rank=1, seen_by=2)
            truth[Part.DETECTION] += detection_s
            truth[Part.REFORMATION] += gap_s
            now += detection_s + gap_s
    ledger = read(history)
    assert ledger.parts == close(truth)
    assert {part for part in ledger.parts if part in PRODUCTIVE} <= {Part.COMPUTE, Part.DATA}
    assert len(ledger.incidents) == lives - 1


def test_what_keeps_no_account_has_none(tmp_path: Path) -> None:
    resilient.save(tmp_path, 1, {"state": {"x": 1}}).wait(60)
    with pytest.raises(NotFoundError, match="nothing here keeps an account"):
        read_ledger(open_store(tmp_path), clock=SYSTEM_CLOCK)


def test_a_job_that_stands_still_makes_no_steps() -> None:
    """Whoever watches a run wants to see exactly that, before any timeout of a hang is over."""
    history = History()
    claim = history.claim(0.0)
    history.journal(
        claim, 0.0, [(0.0, started(claim)), *((10.0 + n, taken(10.0 + n, n, 1, 1.0)) for n in range(1, 11))]
    )
    journal = read_journals(history.store, claim, nonce(claim))[0]
    standing = life_of(journal, until_s=BEGAN_S + 320.0, failed=False)
    assert standing[-1].to_step == 10
    assert sum_of(standing)[Part.OUTSIDE] > 290
    failed = life_of(journal, until_s=BEGAN_S + 320.0)
    assert 10 < failed[-1].to_step < 15, "it could not tell of what it made after its last report"
    assert sum_of(failed)[Part.DETECTION] > 290


def each_second(began_s: float, steps: range, ahead_s: float = 0.0) -> list[tuple[float, Event]]:
    """Return reports of steps of one second each, of which the first one begins then."""
    ends = [(began_s + number, step) for number, step in enumerate(steps, start=1)]
    return [(end_s, taken(end_s + ahead_s, step, 1, 1.0)) for end_s, step in ends]


def test_a_failure_before_the_first_step_takes_nothing_from_the_account_of_the_one_before_it() -> None:
    history = History()
    one = history.claim(1.0)
    history.journal(one, 0.0, [(2.0, started(one)), *each_second(2.0, range(1, 101))])
    history.failed(one, 102.0, step=100)
    two = history.claim(112.0, based=False)
    history.journal(two, 110.0, [])
    history.failed(two, 115.0, said="RuntimeError: CUDA error: no device")
    three = history.claim(126.0, resumed=(80, one))
    history.journal(three, 125.0, [(127.0, started(three, 80)), *each_second(127.0, range(81, 110))])
    history.sign(157.0)
    first, second = read(history).incidents
    assert (first.last_step, first.resumed_step, first.lost_steps) == (100, 80, 20)
    assert first.parts == close({Part.LOST: 20.0, Part.REFORMATION: 8.0, Part.START: 5.0})
    assert (second.resumed_step, second.lost_steps) == (80, 0)
    assert second.parts == close({Part.REFORMATION: 10.0, Part.START: 2.0})


def test_who_goes_back_twice_after_one_failure_takes_both_from_it() -> None:
    history = History()
    one = history.claim(1.0)
    history.journal(one, 0.0, [(2.0, started(one)), *each_second(2.0, range(1, 101))])
    history.failed(one, 102.0, step=100)
    two = history.claim(103.0, resumed=(80, one))
    history.journal(two, 103.0, [])
    history.failed(two, 105.0)
    three = history.claim(106.0, resumed=(60, one))
    history.journal(three, 106.0, [(107.0, started(three, 60)), *each_second(107.0, range(61, 70))])
    history.sign(116.0)
    ledger = read(history)
    first, second = ledger.incidents
    assert (first.parts[Part.LOST], second.parts.get(Part.LOST, 0.0)) == pytest.approx((40.0, 0.0), abs=1e-3)
    assert ledger.generations[0].parts[Part.LOST] == pytest.approx(40.0, abs=1e-3)


def test_a_hang_that_was_found_is_not_productive_though_the_job_lives() -> None:
    history = History()
    claim = history.claim(0.0)
    found = events.HangFound(section="step", step=95, age_s=80.0, timeout_s=60.0, cause=0, cause_section="step", why="")
    history.journal(
        claim, 0.0, [(0.0, started(claim)), *each_second(0.0, range(1, 96)), (175.0, found)], sla=0.9
    )  # fmt: skip
    history.hangs(claim, 175.0, step=95, age_s=80.0)
    history.sign(215.0)
    ledger = read(history)
    assert ledger.parts == close({Part.COMPUTE: 95.0, Part.DETECTION: 120.0})
    assert ledger.generations[0].end is End.RUNNING
    assert (ledger.incidents, [each.kind for each in ledger.notes]) == ((), ["HangFound"])
    assert ledger.promise is not None
    assert ledger.promise.delivered == pytest.approx(95 / 215)


def test_silence_of_a_job_that_lives_is_an_evaluation_only_for_a_while() -> None:
    history = History()
    claim = history.claim(0.0)
    history.journal(claim, 0.0, [(0.0, started(claim)), *each_second(0.0, range(1, 96))])
    history.sign(95.0 + 250.0)
    assert read(history).ettr == pytest.approx(1.0)
    history.sign(95.0 + 1200.0)
    ledger = read(history)
    assert ledger.parts[Part.OUTSIDE] < 300
    assert ledger.parts[Part.DETECTION] == pytest.approx(900.0)
    assert ledger.step == 95


def test_a_failure_in_an_evaluation_has_lost_no_step_and_was_not_found_late() -> None:
    history = History()
    one = history.claim(0.0)
    history.journal(one, 0.0, [(0.0, started(one)), *each_second(0.0, range(1, 101))])
    history.failed(one, 700.0, step=100)
    two = history.claim(710.0, resumed=(100, one))
    history.journal(two, 710.0, [(711.0, started(two, 100)), *each_second(711.0, range(101, 110))])
    history.sign(720.0)
    ledger = read(history)
    (incident,) = ledger.incidents
    assert (incident.last_step, incident.lost_steps) == (100, 0)
    assert incident.parts == close({Part.REFORMATION: 10.0, Part.START: 1.0})
    assert ledger.parts[Part.OUTSIDE] == pytest.approx(600.0)


def test_no_more_steps_were_made_than_is_known_and_standing_still_belongs_to_the_failure() -> None:
    def failed(step: int | None = None) -> History:
        history = History()
        one = history.claim(0.0)
        steps: list[tuple[float, Event]] = [(5.0 * n, taken(5.0 * n, 5 * n, 5, 5.0)) for n in range(1, 11)]
        history.journal(one, 0.0, [(0.0, started(one)), *steps])
        history.failed(one, 80.0, step=step)
        two = history.claim(90.0, resumed=(50, one))
        history.journal(two, 90.0, [(91.0, started(two, 50)), *each_second(91.0, range(51, 60))])
        history.sign(100.0)
        return history

    (nobody_knows,) = read(failed()).incidents
    assert nobody_knows.last_step == 59, "reports were five seconds apart, and may be half as long again"
    (known,) = read(failed(step=53)).incidents
    assert (known.last_step, known.lost_steps) == (53, 3)
    for incident in (nobody_knows, known):
        assert incident.parts[Part.LOST] + incident.parts[Part.DETECTION] == pytest.approx(30.0)
        assert incident.parts[Part.DETECTION] == pytest.approx(20.5)
    (long_after,) = read(failed(step=70)).incidents
    assert (long_after.last_step, long_after.lost_steps) == (70, 20), "it was said to have made them"
    assert long_after.parts[Part.LOST] == pytest.approx(21.0, abs=0.01)


def test_a_planned_resize_is_no_failure_and_parked_workers_save_nothing() -> None:
    def resized(error: str | None, broken_s: float = 111.0) -> History:
        history = History()
        one = history.claim(1.0, ranks=2)
        for rank in (0, 1):
            save = events.SaveStarted(step=100, reason="stop", nbytes=1, stall_s=0.1)
            stopped = events.Stopped(rank=rank, step=100, kind="resize", why="a node came", error=error, newest=100)
            words: list[tuple[float, Event]] = [(102.1, save), (103.0, stopped)]
            records = [(2.0, started(one)), *each_second(2.0, range(1, 101)), *words]
            history.journal(one, 0.0, records, rank=rank, ranks=2)
        history.failed(one, broken_s, rank=1, ranks=2, seen_by=0, said="process ended by SIGTERM")
        two = history.claim(115.0, resumed=(100, one))
        history.journal(two, 113.0, [(116.0, started(two, 100)), *each_second(116.0, range(101, 131))])
        history.sign(146.0)
        return history

    ledger = read(resized(None))
    assert [each.end for each in ledger.generations] == [End.STOPPED, End.RUNNING]
    assert ledger.incidents == ()
    assert ledger.parts[Part.REFORMATION] == pytest.approx(10.0)
    assert ledger.parts[Part.SAVE] == pytest.approx(1.0)
    for failed in (resized("the store is away"), resized(None, broken_s=50.0)):
        assert [each.generation for each in read(failed).incidents] == [1]


def test_a_resize_is_known_by_its_save_where_parked_workers_were_ended_too_soon_to_tell() -> None:
    def resized(reason: str) -> Ledger:
        history = History()
        one = history.claim(1.0)
        history.journal(one, 0.0, [(2.0, started(one)), *each_second(2.0, range(1, 101))])
        history.commit(one, 104.0, 102, reason)
        history.failed(one, 111.0, seen_by=1, said="process ended by SIGTERM")
        two = history.claim(115.0, resumed=(102, one))
        history.journal(two, 113.0, [(116.0, started(two, 102)), *each_second(116.0, range(103, 131))])
        history.sign(147.0)
        return read(history)

    ledger = resized("stop")
    assert (ledger.incidents, ledger.generations[0].end, ledger.generations[0].last_step) == ((), End.STOPPED, 102)
    assert ledger.parts[Part.REFORMATION] == pytest.approx(9.0)
    assert [each.generation for each in resized("interval").incidents] == [1]


@pytest.mark.parametrize("ahead_s", [600.0, -60.0])
def test_a_wrong_clock_of_one_node_is_found_and_corrected(ahead_s: float) -> None:
    def told(ahead_s: float) -> Ledger:
        history = History()
        one = history.claim(1.0, ranks=2)
        for rank, ahead in ((0, 0.0), (1, ahead_s)):
            steps = [(5.0 * n + rank, taken(5.0 * n + rank + ahead, 5 * n + rank, 5, 5.0)) for n in range(1, 11)]
            records = [(0.0, started(one)), *steps]
            history.journal(one, 0.0, records, rank=rank, ranks=2, host=f"node-{rank}", ahead_s=ahead)
        history.failed(one, 51.5 + ahead_s, rank=1, ranks=2, step=51)
        two = history.claim(60.0, ranks=2, resumed=(40, one))
        for rank, ahead in ((0, 0.0), (1, ahead_s)):
            records = [(61.0, started(two, 40)), *each_second(61.0, range(41, 61), ahead)]
            records += [(81.0, events.Ended(rank=rank, step=60, how="done", error=""))]
            history.journal(two, 58.0, records, rank=rank, ranks=2, host=f"node-{rank}", ahead_s=ahead)
        return read(history)

    right, wrong = told(0.0), told(ahead_s)
    assert wrong.parts == close(dict(right.parts))
    assert [each.at_s for each in wrong.incidents] == pytest.approx([each.at_s for each in right.incidents])
    assert right.missing == ()
    assert wrong.missing == (
        f"the clock of node-1 is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}, corrected",
    )


def test_a_rank_that_restores_for_longer_has_no_wrong_clock() -> None:
    history = History()
    claim = history.claim(0.0, ranks=2)
    for rank, restored_s in ((0, 5.0), (1, 35.0)):
        history.journal(claim, 0.0, [(restored_s, started(claim))], rank=rank, ranks=2)
    history.sign(40.0)
    assert read(history).missing == ()


def test_samples_of_machines_are_joined_or_not_even_read() -> None:
    history = History()
    claim = history.claim(0.0)
    history.journal(claim, 0.0, [(0.0, started(claim)), *each_second(0.0, range(1, 61))])
    begins = [0.0, 10.0, 30.0, 2000.0]
    samples = [
        events.MachineSampled(host="node", began_s=BEGAN_S + at_s, period_s=1.0, values=(("cpu", (at_s,) * 10),))
        for at_s in begins
    ]
    history.journal(claim, 0.0, [(60.0, each) for each in samples], stream="machine")
    ledger = read(history)
    values = [each.values["cpu"] for each in ledger.machines]
    assert [len(each) for each in values] == [40, 10]
    assert [math.isnan(each) for each in values[0]] == [False] * 20 + [True] * 10 + [False] * 10
    history.store.put(layout.journal(claim, nonce(claim), 0, "machine", 0), [b"not to be read"])
    without = read_ledger(history.store, clock=HandClock(), machines=False)
    assert (without.machines, without.missing) == ((), ())
    assert without.parts == ledger.parts
