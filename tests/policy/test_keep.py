from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.errors import UsageError
from resilient.policy.keep import Keep

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Saved:
    step: int
    created: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


def saved(*steps: int) -> list[Saved]:
    return [Saved(step) for step in steps]


def timed(*minutes: float) -> list[Saved]:
    """Return checkpoints 0, 1, 2, ... that were saved so many minutes after the beginning."""
    return [Saved(step, (BEGIN + timedelta(minutes=at)).isoformat()) for step, at in enumerate(minutes)]


def scored(*losses: float | None) -> list[Saved]:
    return [Saved(step, metrics={} if loss is None else {"loss": loss}) for step, loss in enumerate(losses)]


STEPS = st.lists(st.integers(0, 1000), unique=True)


@given(STEPS, st.integers(1, 5), st.none() | st.integers(1, 50))
def test_the_newest_and_every_multiple_stay(steps: list[int], last: int, every: int | None) -> None:
    kept = Keep(last=last, every=every).kept(saved(*steps))
    newest = sorted(steps)[-last:]
    assert kept == {step for step in steps if step in newest or (every and step % every == 0)}
    assert not steps or max(steps) in kept


@pytest.mark.field_report("BR-147")
def test_steps_are_ordered_as_numbers() -> None:
    assert Keep(last=2).kept(saved(900, 1000, 10000, 9900)) == {10000, 9900}


def test_one_stays_for_each_span_of_time_from_the_oldest_on() -> None:
    kept = Keep(last=1, every_time="1h").kept(timed(0, 20, 40, 61, 80, 119, 122, 130))
    assert kept == {0, 3, 6, 7}
    assert Keep(last=1, every_time="1h").kept([one for one in timed(0, 20, 40, 61) if one.step != 1]) == {0, 3}


def test_what_is_kept_by_time_is_kept_again_after_the_others_are_gone() -> None:
    everything = timed(*range(0, 600, 7))
    policy = Keep(last=1, every_time="1h")
    steps: set[int] = set()
    staying: list[Saved] = []
    for one in everything:  # retention after every save, as in a run
        staying = [each for each in [*staying, one] if each.step in policy.kept([*staying, one])]
        steps = {each.step for each in staying}
    assert steps == policy.kept(everything)
    assert len(steps) == 11


@given(st.lists(st.integers(-600, 600), min_size=1, max_size=30))
def test_a_clock_that_jumps_never_costs_the_first_and_the_newest(minutes: list[int]) -> None:
    kept = Keep(last=1, every_time="1h").kept(timed(*minutes))
    assert {0, len(minutes) - 1} <= kept
    backward = {step for step in range(1, len(minutes)) if minutes[step] < min(minutes[:step])}
    assert backward <= kept


def test_a_time_that_cannot_be_read_keeps() -> None:
    assert Keep(last=1, every_time="1h").kept([Saved(1, "soon"), Saved(2, ""), *timed(0, 1)[:1]]) == {0, 1, 2}


def test_the_best_stay_and_of_equals_the_newer() -> None:
    some = scored(0.5, 0.2, None, 0.9, 0.2, float("nan"), 0.7)
    assert Keep(last=1, best=1, metric="loss").kept(some) == {4, 6}
    assert Keep(last=1, best=2, metric="loss").kept(some) == {1, 4, 6}
    assert Keep(last=1, best=1, metric="loss", mode="max").kept(some) == {3, 6}
    assert Keep(last=1, best=3, metric="accuracy").kept(some) == {6}


@pytest.mark.field_report("BR-146")
@pytest.mark.parametrize(
    "losses", [(0.1, 0.5, 0.9), (0.9, 0.5, 0.1), (0.5, 0.1, 0.9)], ids=["first", "last", "between"]
)
def test_keeping_one_and_the_best_leaves_the_newest_wherever_the_best_is(losses: tuple[float, ...]) -> None:
    kept = Keep(last=1, best=1, metric="loss").kept(scored(*losses))
    assert kept == {2, losses.index(min(losses))}


@given(STEPS, st.sets(st.integers(0, 1000)), st.integers(1, 5))
def test_failed_ones_take_nobodys_place(steps: list[int], failed: set[int], last: int) -> None:
    kept = Keep(last=last).kept(saved(*steps), failed=failed)
    good = sorted(set(steps) - failed)
    assert kept == {*sorted(steps)[-last:], *good[-last:]}


def test_a_failed_one_is_not_the_best() -> None:
    assert Keep(last=1, best=1, metric="loss").kept(scored(0.1, 0.2, 0.3), failed={0}) == {1, 2}


@given(st.data())
def test_two_policies_together_keep_what_either_keeps(data: st.DataObject) -> None:
    bests: st.SearchStrategy[dict[str, Any]] = st.sampled_from([{}, {"best": 2, "metric": "loss"}])
    one, other = (
        Keep(
            last=data.draw(st.integers(1, 4)),
            every=data.draw(st.none() | st.integers(1, 9)),
            every_time=data.draw(st.none() | st.sampled_from(["5min", "1h"])),
            **data.draw(bests),
        )
        for _ in range(2)
    )
    count = data.draw(st.integers(0, 20))
    some = [
        Saved(step, (BEGIN + timedelta(minutes=3 * step)).isoformat(), {"loss": (step * 7) % 5})
        for step in range(count)
    ]
    failed = data.draw(st.sets(st.integers(0, 20)))
    both = (one | other).kept(some, failed=failed)
    assert both == one.kept(some, failed=failed) | other.kept(some, failed=failed)
    packed = msgspec.msgpack.encode(one | other)  # as it goes to the writer
    assert msgspec.msgpack.decode(packed, type=Keep) == one | other


@pytest.mark.parametrize(
    "arguments",
    [
        {"last": 0},
        {"last": -1},
        {"last": True},
        {"every": 0},
        {"every_time": "soon"},
        {"best": 0, "metric": "loss"},
        {"best": 2},
        {"metric": "loss"},
        {"best": 2, "metric": "loss", "mode": "most"},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must"):
        Keep(**arguments)
