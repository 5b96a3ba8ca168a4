"""What a plan takes from a run's own account, and how sure it is of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilient.report.fitting import Measurement, fit
from resilient.report.model import End, GenerationTime, Incident, Ledger, Part, SaveTime

DAY_S = 86_400.0


def life(number: int, began_s: float, ended_s: float, *, hosts: int = 2, ranks: int = 16) -> GenerationTime:
    return GenerationTime(
        generation=number,
        nonce=str(number),
        world_size=ranks,
        hosts=tuple(f"node{i}" for i in range(hosts)),
        began_s=began_s,
        ended_s=ended_s,
        resumed_step=None,
        last_step=10,
        kept_step=None,
        end=End.FAILED,
        parts={Part.COMPUTE: ended_s - began_s},
    )


def incident(generation: int, **parts: float) -> Incident:
    return Incident(
        at_s=0.0,
        generation=generation,
        failure="unknown",
        confidence="possible",
        rank=None,
        node=None,
        why="",
        proof=(),
        action="",
        because="",
        last_step=10,
        resumed_step=5,
        lost_steps=5,
        parts={Part[name.upper()]: seconds for name, seconds in parts.items()},
    )


def save(generation: int, at_s: float, stall_s: float, commit_s: float | None, reason: str = "interval") -> SaveTime:
    return SaveTime(
        at_s=at_s,
        generation=generation,
        step=int(at_s),
        reason=reason,
        nbytes=1,
        stall_s=stall_s,
        persist_s=1.0,
        commit_s=commit_s,
    )


def ledger(*lives: GenerationTime, incidents: tuple[Incident, ...] = (), saves: tuple[SaveTime, ...] = ()) -> Ledger:
    ends = [each.ended_s for each in lives]
    return Ledger(
        url="memory://run",
        run_id="run",
        began_s=0.0,
        as_of_s=max(ends, default=0.0),
        step=10,
        parts={},
        generations=lives,
        incidents=incidents,
        saves=saves,
    )


def test_the_rate_is_by_node_days_and_its_limits_are_those_of_the_count() -> None:
    lives = (life(1, 0, DAY_S), life(2, DAY_S, 3 * DAY_S, hosts=4, ranks=32))
    fitted = fit(ledger(*lives, incidents=(incident(1), incident(2), incident(2))))
    assert fitted is not None
    assert (fitted.gpus, fitted.gpus_per_node, fitted.failures, fitted.node_days) == (32, 8, 3, 10)
    assert fitted.rate == 300
    assert (fitted.rate_low, fitted.rate_high) == pytest.approx((61.87, 876.7), rel=1e-3)


def test_a_run_without_a_failure_tells_how_rare_they_are_at_most() -> None:
    fitted = fit(ledger(life(1, 0, DAY_S)))
    assert fitted is not None
    assert (fitted.rate, fitted.rate_low) == (None, 0)
    assert fitted.rate_high == pytest.approx(3.689 / 2 * 1000, rel=1e-3)
    assert (fitted.stall, fitted.persist, fitted.recovery, fitted.interval) == (None, None, None, None)
    assert fit(ledger()) is None


def test_costs_are_means_with_their_spread() -> None:
    saves = (
        save(1, 10, 0.1, 4),
        save(1, 40, 0.2, 6),
        save(1, 90, 0.6, None),
        save(2, 500, 0.3, 8),
        save(2, 510, 0.3, 8, "stop"),
    )
    incidents = (
        incident(1, detection=10, reformation=20, start=30, restore=10, lost=100),
        incident(2, detection=30, lost=7),  # nothing has come after it yet
    )
    fitted = fit(ledger(life(1, 0, 400), life(2, 450, 600), incidents=incidents, saves=saves))
    assert fitted is not None
    assert fitted.stall is not None
    assert (fitted.stall.mean_s, fitted.stall.low_s, fitted.stall.high_s) == pytest.approx((0.3, 0.1, 0.6))
    assert fitted.persist is not None
    assert fitted.persist.mean_s == pytest.approx((4 + 6 + 1 + 8) / 4)
    assert fitted.persist.count == 4
    assert fitted.recovery is not None
    assert (fitted.recovery.mean_s, fitted.recovery.count) == (60, 1)
    assert fitted.detection is not None
    assert (fitted.detection.mean_s, fitted.detection.count) == (20, 2)
    assert fitted.interval is not None
    assert (fitted.interval.mean_s, fitted.interval.low_s, fitted.interval.count) == (40, 30, 2)


def test_the_last_save_of_a_life_which_training_waits_for_is_no_usual_one() -> None:
    last = (save(1, 200, 50, 50, "end"), save(2, 600, 40, 40, "stop"))
    fitted = fit(ledger(life(1, 0, 400), life(2, 450, 700), saves=(save(1, 10, 0.1, 4), *last)))
    assert fitted is not None
    assert fitted.stall == Measurement(mean_s=0.1, low_s=0.1, high_s=0.1, count=1)
    assert fitted.persist == Measurement(mean_s=4, low_s=4, high_s=4, count=1)
    alone = fit(ledger(life(1, 0, 400), saves=last))
    assert alone is not None
    assert alone.stall is None
    assert alone.persist == Measurement(mean_s=45, low_s=40, high_s=50, count=2), "better than nothing"


def test_waiting_to_be_started_again_is_part_of_the_recovery_and_said_by_itself() -> None:
    incidents = (
        incident(1, detection=2, idle=9, start=4, restore=2),
        incident(2, detection=2, reformation=1, start=4),
        incident(3, detection=2, idle=3),  # it has not come to anything after that
        incident(4, detection=2),  # nothing has come after it yet
    )
    fitted = fit(ledger(life(1, 0, 400), incidents=incidents))
    assert fitted is not None
    assert fitted.recovery == Measurement(mean_s=23 / 3, low_s=3, high_s=15, count=3)
    assert fitted.idle == Measurement(mean_s=4, low_s=0, high_s=9, count=3)
    never = fit(ledger(life(1, 0, 400), incidents=incidents[1:2]))
    assert never is not None
    assert never.idle is None


def test_a_run_that_keeps_no_account_is_not_fitted() -> None:
    silent = replace(life(1, 0, 400), parts={Part.START: 380.0, Part.DETECTION: 20.0})
    assert fit(ledger(silent, incidents=(incident(1, detection=20),))) is None
    lost = replace(life(2, 420, 500), parts={Part.START: 10.0, Part.LOST: 70.0})
    fitted = fit(ledger(silent, lost))
    assert fitted is not None, "steps that were lost have been made"
