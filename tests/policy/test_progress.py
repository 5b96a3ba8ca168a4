"""Silence is a symptom, a section that lasts too long is a hang, and the rank that waits for nobody is its cause."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from statistics import fmean, pstdev

import pytest

from resilient.policy.progress import (
    MAY_WAIT,
    RUNNING,
    WAITS,
    Glance,
    Heard,
    Overdue,
    Patience,
    Progress,
    Seen,
    Silent,
    Standing,
    WentOn,
    first_cause,
    merged,
)
from tests.figures import Figures

STEPS, SLOW_EVERY, SLOW, SAVE_EVERY, WARM_UP = 10_000, 100, 20.0, 50, 5


class Phi:
    """A plain phi-accrual detector (Hayashibara et al., SRDS 2004) on the ends of steps, with Hazelcast's defaults."""

    THRESHOLD, SAMPLES, LEAST_DEVIATION = 10.0, 200, 0.1

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=self.SAMPLES)

    def alarms_before(self, gap_s: float) -> bool:
        """Say whether it would have taken the process for dead before this step has ended; then learn from it."""
        alarm = False
        if len(self._gaps) >= 10:
            mean = fmean(self._gaps)
            deviation = max(pstdev(self._gaps), self.LEAST_DEVIATION * mean)
            later = 0.5 * math.erfc((gap_s - mean) / deviation / math.sqrt(2))
            alarm = later <= 10**-self.THRESHOLD
        self._gaps.append(gap_s)
        return alarm


def trace(step_s: float, seed: int) -> Iterator[tuple[str, int, float]]:
    """Yield section, step and duration of a healthy training: jitter of 10 %, slow steps, and saves that block."""
    draw = random.Random(seed)
    for step in range(STEPS):
        yield "data", step, step_s * draw.uniform(0.001, 0.02)
        slow = SLOW if step % SLOW_EVERY == SLOW_EVERY - 1 else 1.0
        name = "step" if step >= WARM_UP else "warm-up"
        yield name, step, step_s * slow * max(0.5, draw.gauss(1.0, 0.1))
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            yield "save", step + 1, step_s * draw.uniform(0.2, 3.0)


class Follower:
    """Feeds the detector what a watcher would see, but looks only where an alarm could begin: right before the end."""

    def __init__(self, patience: Patience) -> None:
        self.now_s = 0.0
        self.progress = Progress(1e9, patience)  # no gap between two looks counts as a suspension
        self.seen: dict[str, Seen] = {}
        self.mark = 0
        self.alarms: list[Overdue] = []

    def live(self, section: str, step: int, duration_s: float) -> None:
        self.mark += 1
        before = self.seen.get(section, Seen())
        glance = Glance(
            beat_s=self.now_s, section=section, step=step, started_s=self.now_s, mark=self.mark, seen=before
        )
        self.now_s += duration_s
        found = self.progress.look(self.now_s, glance)
        self.alarms += [each for each in found if isinstance(each, Overdue)]
        self.seen[section] = Seen(count=before.count + 1, longest_s=max(before.longest_s, duration_s))


@pytest.mark.proof
def test_no_false_alarm_in_10_000_steps_with_every_100th_20_times_slower(
    count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    kept = figures("false-alarms", "false alarms on a healthy trace: learned timeouts, and a phi-accrual detector")
    for number in range(len(kept), count(4, 20)):
        step_s, seed = (0.05, 0.5, 5.0, 30.0)[number % 4], number
        follower, phi, phi_alarms, since_s = Follower(Patience()), Phi(), 0, 0.0
        for section, step, duration_s in trace(step_s, seed):
            follower.live(section, step, duration_s)
            since_s += duration_s
            if section in ("step", "warm-up"):
                phi_alarms += phi.alarms_before(since_s)
                since_s = 0.0
        assert follower.alarms == [], f"seed {seed}"
        assert phi_alarms >= 0.9 * STEPS / SLOW_EVERY, "the trace is too easy"
        timeout_s = follower.progress.timeout_s("step", follower.seen["step"])
        assert timeout_s < max(60.1, 7 * SLOW * step_s), "it would see no hang either"
        kept.add(step_s=step_s, steps=STEPS, alarms=len(follower.alarms), phi_alarms=phi_alarms, timeout_s=timeout_s)


def test_a_section_gets_more_time_the_less_often_it_was_seen() -> None:
    patience = Patience(floor_s=60.0, unlearned_s=1800.0)
    assert patience.timeout_s(Seen()) == 1800.0
    assert patience.timeout_s(Seen(count=1, longest_s=1.0)) == 1800.0
    assert patience.timeout_s(Seen(count=50, longest_s=20.0)) == 1000.0
    assert patience.timeout_s(Seen(count=5000, longest_s=20.0)) == 100.0
    assert patience.timeout_s(Seen(count=5000, longest_s=0.1)) == 60.0
    assert patience.timeout_s(Seen(count=1, longest_s=1000.0)) == 5000.0, "what was seen once is never a hang"


def test_lives_are_smoothed_but_a_slower_one_is_believed_at_once() -> None:
    assert merged(Seen(count=10, longest_s=8.0), Seen(count=5, longest_s=2.0)) == Seen(count=15, longest_s=5.0)
    assert merged(Seen(count=10, longest_s=2.0), Seen(count=5, longest_s=8.0)) == Seen(count=15, longest_s=8.0)
    assert merged(Seen(count=10, longest_s=2.0), Seen()) == Seen(count=10, longest_s=2.0)
    assert merged(Seen(), Seen(count=1, longest_s=3.0)) == Seen(count=1, longest_s=3.0)


def look_until(
    progress: Progress, until_s: float, glance: Callable[[float], Glance], start_s: float = 0.0
) -> list[tuple[float, object]]:
    """Look four times a second; return each finding with its time."""
    found: list[tuple[float, object]] = []
    for quarter in range(int(start_s * 4), int(until_s * 4) + 1):
        now_s = quarter / 4
        found += [(now_s, each) for each in progress.look(now_s, glance(now_s))]
    return found


def at(now_s: float, *, beat_s: float | None = None, mark: int = 1, started_s: float = 0.0) -> Glance:
    seen = Seen(count=1000, longest_s=2.0)
    return Glance(
        beat_s=now_s if beat_s is None else beat_s, section="step", step=7, started_s=started_s, mark=mark, seen=seen
    )


def test_silence_is_a_symptom_within_three_intervals_and_no_hang_before_the_learned_timeout() -> None:
    progress = Progress(1.0, Patience(floor_s=5.0))
    found = look_until(progress, 30.0, lambda now_s: at(now_s, beat_s=min(now_s, 1.0)))
    (silent_s, silent), (overdue_s, overdue) = found
    assert isinstance(silent, Silent)
    assert silent_s - 1.0 <= 3.0
    assert isinstance(overdue, Overdue)
    assert (overdue.timeout_s, overdue_s) == (10.0, 10.25), "five times the longest, and said once"


def test_a_long_step_that_holds_the_lock_is_a_symptom_and_then_it_is_heard_again() -> None:
    progress = Progress(1.0, Patience(floor_s=60.0))
    found = look_until(progress, 20.0, lambda now_s: at(now_s, beat_s=now_s if now_s > 9.0 else 0.0))
    assert [type(each) for _, each in found] == [Silent, Heard]


def test_a_hang_that_ends_is_over_and_the_next_one_is_a_new_one() -> None:
    progress = Progress(1.0, Patience(floor_s=5.0))
    found = look_until(progress, 12.0, at)
    found += look_until(progress, 30.0, lambda now_s: at(now_s, mark=2, started_s=12.0), 12.25)
    assert [type(each) for _, each in found] == [Overdue, WentOn, Overdue]


def test_what_nobody_looked_at_is_held_against_nobody() -> None:
    progress = Progress(1.0, Patience(floor_s=5.0))
    found = look_until(progress, 5.0, at)
    # The machine was suspended for an hour, watcher and all; the rank beats half a second after it woke up.
    found += look_until(progress, 3609.0, lambda now_s: at(now_s, beat_s=5.0 if now_s < 3605.5 else now_s), 3605.0)
    assert found == []
    found = look_until(progress, 3620.0, at, 3609.25)
    assert [type(each) for _, each in found] == [Overdue], "but time that was looked at counts"


def stand(rank: int, section: str = "step", step: int = 7, waits: int = WAITS, **more: object) -> Standing:
    return Standing(rank=rank, section=section, step=step, age_s=60.0, waits=waits, **more)  # type: ignore[arg-type]  # a table


CAUSES: dict[str, tuple[list[Standing], int, int | None, str]] = {
    "one waits for nobody": ([stand(0), stand(1, "save", waits=RUNNING), stand(2)], 3, 1, "save"),
    "it is one of two": ([stand(0, "data", waits=RUNNING), stand(1)], 2, 0, "data"),
    "others are in a backward pass": (
        [stand(0, waits=MAY_WAIT), stand(1, waits=MAY_WAIT), stand(2, waits=RUNNING)],
        3,
        2,
        "step",
    ),
    "one is behind": ([stand(0, step=8), stand(1, step=7), stand(2, step=8)], 3, 1, "step"),
    "one is stopped": ([stand(0), stand(1, stopped=True, waits=RUNNING), stand(2, waits=RUNNING)], 3, 1, "step"),
    "one is in another collective": (
        [stand(0, signature="all_reduce"), stand(1, signature="all_reduce"), stand(2, signature="recv")],
        3,
        2,
        "step",
    ),
    "one has said nothing": ([stand(0), stand(2)], 3, 1, ""),
    "two have said nothing": ([stand(0)], 3, None, ""),
    "all look alike": ([stand(0), stand(1), stand(2)], 3, None, "step"),
    "of two, each in another collective": ([stand(0, signature="a"), stand(1, signature="b")], 2, None, "step"),
    "it is alone": ([stand(0, "data", waits=RUNNING)], 1, 0, "data"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_rank_that_the_others_wait_for_is_the_cause(name: str) -> None:
    standings, world_size, rank, section = CAUSES[name]
    for order in (standings, standings[::-1]):
        verdict = first_cause(order, world_size)
        assert (verdict.rank, verdict.section) == (rank, section), verdict.why
