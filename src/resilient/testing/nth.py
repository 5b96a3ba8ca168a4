"""A scenario in which the N-th operation of the store fails: for N = 1, 2, 3, … and in each way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Final, TypeAlias

from resilient.errors import ResilientError
from resilient.store.base import Store
from resilient.store.retrying import Retrying
from resilient.testing.faulty_store import LISTS, Crashed, Fault, FaultyStore, Mode
from resilient.testing.invariants import Expected, check_run

Report: TypeAlias = Callable[[int], None]

FAULTS: Final = (
    Fault(mode=Mode.FAIL),
    Fault(mode=Mode.FAIL, times=None),
    Fault(mode=Mode.FAIL_FOR_GOOD),
    Fault(mode=Mode.THROTTLE),
    Fault(mode=Mode.TEAR),
    Fault(mode=Mode.LOSE_RESPONSE),
    Fault(mode=Mode.CRASH),
    Fault(mode=Mode.NO_SPACE, times=None),
    Fault(mode=Mode.EXPIRED, times=None),
    Fault(mode=Mode.DENIED, verbs=LISTS),
    Fault(mode=Mode.STALE_LIST, stale_keys=3),
    Fault(mode=Mode.SHORT_READ),
    Fault(mode=Mode.CORRUPT_READ),
)
"""What may happen to an operation. ``times=None``: to it and to all that follow, as when a store stays away."""

_PASSING: Final = frozenset({Mode.FAIL, Mode.THROTTLE, Mode.TEAR, Mode.LOSE_RESPONSE, Mode.STALE_LIST, Mode.DELAY})
_TIMEOUT_S: Final = 20.0
_GOLDEN: Final = 0.6180339887498949


def _nothing(_: Store) -> int | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Something that is done to a run, and how a new process goes on after it.

    ``act(store, report)`` does it, and calls ``report(step)`` when told that a step is saved, or was restored. It may
    raise `ResilientError`; when it ends, nothing that it began goes on. ``prepare(store)`` makes what is there before,
    and returns its newest step. ``restart(store)`` is the next life: it saves one more step, and returns it; what else
    must be true then, it asserts. ``expected(step)`` is what a checkpoint holds, for `check_run`.
    """

    act: Callable[[Store, Report], None]
    restart: Callable[[Store], int]
    prepare: Callable[[Store], int | None] = _nothing
    expected: Expected | None = None


def fail_each_operation(
    make_store: Callable[[], Store],
    scenario: Scenario,
    *,
    faults: Sequence[Fault] = FAULTS,
    most: int | None = None,
) -> dict[str, int]:
    """Let the N-th operation of the store fail, for N = 1, 2, 3, … until none is hit any more, in each way.

    After each: what `check_run` says of the place, as a new process finds it, must be nothing; the newest step that was
    reported must be there; and the next life must be able to save. A fault that passes (one error that may pass, one
    lost response, one stale listing) may not be noticed at all: what is tried must end as it does without. Retries are
    those of a store that was opened from a URL, and nobody waits for them.

    Args:
        make_store: returns an empty place; called for each point.
        scenario: what is tried.
        faults: ``at`` is set by this function.
        most: try only so many N for each fault, spread over all operations; None tries every one.

    Returns:
        For each fault, how many points were tried.

    Raises:
        AssertionError: a promise was not kept; fault, N and operation are named.
    """
    without = _Trial(make_store(), scenario, None)
    sound = without.run([])
    points: dict[str, int] = {}
    for which, fault in enumerate(faults):
        tried = 0
        for at in count(1) if most is None else _sampled(without.matching(fault), most, which):
            trial = _Trial(make_store(), scenario, replace(fault, at=at))
            trial.run(sound)
            if not trial.hit:
                break
            tried += 1
        points[title(fault)] = tried
    return points


def _sampled(operations: int, most: int, which: int) -> Iterable[int]:
    """Return ``most`` numbers of operations, as far apart as can be; other ones for each fault."""
    apart = max(1, operations // most)
    first = 1 + int(apart * (which * _GOLDEN % 1.0))
    return [at for at in range(first, first + most * apart, apart) if at <= operations]


def title(fault: Fault) -> str:
    """Return the name of a fault, as `fail_each_operation` uses it."""
    verbs = "" if fault.verbs is None else f" of {' or '.join(sorted(fault.verbs))}"
    return f"{fault.mode.value}{verbs}{' from then on' if fault.times is None else ''}"


class _SkippingClock:
    """A clock that moves when somebody sleeps, at once."""

    def __init__(self) -> None:
        self._elapsed_s = 0.0

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self._elapsed_s)

    def monotonic(self) -> float:
        return self._elapsed_s

    def sleep(self, duration_s: float) -> None:
        self._elapsed_s += duration_s


class _Trial:
    """One run of a scenario, with one fault or none."""

    def __init__(self, inner: Store, scenario: Scenario, fault: Fault | None) -> None:
        self._inner = inner
        self._scenario = scenario
        self._fault = fault
        clock = _SkippingClock()
        self._faulty = FaultyStore(inner, clock=clock)
        self._store = Retrying(self._faulty, clock=clock, timeout_s=_TIMEOUT_S)

    @property
    def hit(self) -> bool:
        return self._faulty.fired > 0

    def matching(self, fault: Fault) -> int:
        """Return how many operations of what was tried a fault can hit."""
        return sum(fault.matches(each.verb, each.key) for each in self._faulty.operations)

    def run(self, sound: Sequence[int]) -> list[int]:
        """Return the steps that were reported; ``sound``: those that are without a fault."""
        with self._named():
            before = self._scenario.prepare(self._inner)
            if self._fault is not None:
                self._faulty.inject(self._fault)
            reported: list[int] = []
            ended: BaseException | None = None
            try:
                self._scenario.act(self._store, reported.append)
            except (ResilientError, Crashed) as error:
                ended = error
            if not self.hit or self._passes:
                self._check_unnoticed(ended, reported, sound)
            newest = max([*reported, *([] if before is None else [before])], default=None)
            self._check(newest, "")
            self._check(self._scenario.restart(self._inner), "after the next life has saved: ")
            self._inner.close()
        return reported

    @property
    def _passes(self) -> bool:
        fault = self._fault
        if fault is None or fault.times is None or fault.mode not in _PASSING:
            return False
        # Where half an object can be left behind, another writer may have seen it: whoever retries cannot undo that.
        return fault.mode is not Mode.TEAR or self._inner.capabilities.atomic_put

    def _check_unnoticed(self, ended: BaseException | None, reported: list[int], sound: Sequence[int]) -> None:
        if ended is not None:
            raise AssertionError(f"nothing happened that stays, and it failed: {ended}") from ended
        if self._fault is not None and reported != sound:
            raise AssertionError(f"nothing happened that stays; reported are steps {reported} instead of {sound}")

    def _check(self, at_least: int | None, when: str) -> None:
        violations = check_run(self._inner, at_least=at_least, expected=self._scenario.expected)
        if violations:
            raise AssertionError(when + "; ".join(map(str, violations)))

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the fault in whatever is raised."""
        try:
            yield
        except BaseException as error:
            error.add_note(self._described())
            raise

    def _described(self) -> str:
        fault = self._fault
        if fault is None:
            return "without any fault"
        matching = [each for each in self._faulty.operations if fault.matches(each.verb, each.key)]
        if len(matching) < fault.at:
            return f"with fault {title(fault)!r} at operation {fault.at}, which did not come"
        hit = matching[fault.at - 1]
        return f"with fault {title(fault)!r} at operation {fault.at} that it can hit: {hit.verb} of {hit.key!r}"
