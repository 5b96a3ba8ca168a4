"""In which section a rank is: marks for whoever watches it, and times for whoever compares it with other ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple, Protocol, TypeVar

from resilient.clock import SYSTEM_CLOCK, Clock

T = TypeVar("T")

SETUP: Final = "setup"
RESTORE: Final = "restore"
FIRST: Final = "first step"
WARM_UP: Final = "warm-up"
STEP: Final = "step"
DATA: Final = "data"
SAVE: Final = "save"
OUTSIDE: Final = "outside the loop"
STOP: Final = "stop"
END: Final = "end"

_WARM_UP_STEPS: Final = 5
"""Steps in each life that tell nothing of the others: they compile, allocate, and open connections."""

_MOST_TURNS: Final = 10_000


class Marks(Protocol):
    """Where marks go: `resilient.detect.page.Page`."""

    def section(self, name: str) -> int:
        """Return the number of a section."""
        ...

    def turn_to(self, section: int, step: int) -> float:
        """Begin a section in place of the one that goes on; return how long that was, without what was within it."""
        ...

    def enter(self, section: int) -> None:
        """Begin a section within the one that goes on."""
        ...

    def leave(self) -> float:
        """End it."""
        ...


class TurnWatch(Protocol):
    """Who wants to know of turns: `resilient.run.picture.Picture`."""

    def begin(self, data_s: float, step: int) -> None:
        """Begin a turn that has waited for its batch for ``data_s``, after ``step`` complete ones."""
        ...

    def end(self) -> None:
        """End it."""
        ...

    def drop(self) -> None:
        """Forget it, if one goes on: the loop was left in it."""
        ...


class NoMarks:
    """Marks of a rank that nobody watches: times alone."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._started_s = clock.monotonic()
        self._entered_s: list[float] = []

    def section(self, name: str) -> int:  # noqa: ARG002 -- as `Marks`
        return 0

    def turn_to(self, section: int, step: int) -> float:  # noqa: ARG002 -- as `Marks`
        before_s, self._started_s = self._started_s, self._clock.monotonic()
        return self._started_s - before_s

    def enter(self, section: int) -> None:  # noqa: ARG002 -- as `Marks`
        self._entered_s.append(self._clock.monotonic())

    def leave(self) -> float:
        duration_s = self._clock.monotonic() - self._entered_s.pop()
        if not self._entered_s:
            self._started_s += duration_s
        return duration_s


class Turn(NamedTuple):
    """How long one turn of the loop took, in seconds: waiting for its batch, computing, and all of its step.

    ``compute_s``: from the batch to the first gradient, on this rank alone; None if it cannot be told.
    """

    data_s: float
    compute_s: float | None
    step_s: float


class Spent(NamedTuple):
    """What the turns of a life were spent on so far: how many, with which step complete, and seconds in all."""

    turns: int = 0
    step: int = 0
    turn_s: float = 0.0
    data_s: float = 0.0
    ended_s: float = 0.0  # when the last of them ended, by the monotonic clock


class Counter:
    """Holds what was `Spent`, for any thread to read: one value, replaced at the end of each turn."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self.spent = Spent()

    def add(self, step: int, data_s: float, step_s: float) -> None:
        turns, _, turn_s, all_data_s, _ = self.spent
        now_s = self._clock.monotonic()
        self.spent = Spent(turns + 1, step, turn_s + data_s + step_s, all_data_s + data_s, now_s)


class Sections:
    """The sections of one life of a rank; for the training thread, but for `take`."""

    def __init__(self, marks: Marks, counter: Counter | None = None) -> None:
        self._counter = counter or Counter()
        self._marks = marks
        self._name = ""
        self._turns_here = 0
        self._data_s: float | None = None
        self._turns: deque[Turn] = deque(maxlen=_MOST_TURNS)
        self._data, self._outside = marks.section(DATA), marks.section(OUTSIDE)
        self._first, self._warm_up, self._step = (marks.section(name) for name in (FIRST, WARM_UP, STEP))
        self.begin_compute: Callable[[], None] = _nothing
        self.end_compute: Callable[[], float | None] = _nothing
        self.turn_watch: TurnWatch | None = None
        marks.turn_to(marks.section(SETUP), 0)

    @property
    def name(self) -> str:
        """The section that the program has named, and is in; empty if there is none."""
        return self._name

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Be in a section within the one that goes on."""
        self._marks.enter(self._marks.section(name))
        try:
            yield
        finally:
            self._marks.leave()

    @contextmanager
    def named(self, name: str, step: Callable[[], int]) -> Iterator[None]:
        """Be in a section that the program has named; errors in it say so."""
        before, self._name = self._name, name
        try:
            with self.within(name):
                yield
        except Exception as error:
            error.add_note(f"in section {name!r}, after step {step()}")
            raise
        finally:
            self._name = before

    def turns(self, start: Callable[[], Iterator[T]], step: Callable[[], int]) -> Iterator[T]:
        """Yield the batches of a pass that ``start`` begins; ``step`` returns how many steps are complete."""
        self._end_turn(step())
        batches = start()
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                self.outside(step())
                return
            kind = self._step
            if self._turns_here < _WARM_UP_STEPS:
                kind = self._warm_up if self._turns_here else self._first
            self._turns_here += 1
            self._data_s = self._marks.turn_to(kind, step())
            if self.turn_watch is not None:
                self.turn_watch.begin(self._data_s, step())
            self.begin_compute()
            yield batch
            self._end_turn(step())

    def outside(self, step: int) -> None:
        """Be outside of any loop."""
        if self.turn_watch is not None:
            self.turn_watch.drop()
        self._marks.turn_to(self._outside, step)
        self._data_s = None

    def turn_to(self, name: str, step: int) -> None:
        """Be in a section that begins once in a life."""
        self._marks.turn_to(self._marks.section(name), step)

    def take(self) -> list[Turn]:
        """Return the turns that have ended since this was called last, the newest 10,000 at most; from any thread."""
        taken: list[Turn] = []
        while self._turns:
            taken.append(self._turns.popleft())
        return taken

    def _end_turn(self, step: int) -> None:
        if self.turn_watch is not None and self._data_s is not None:
            self.turn_watch.end()  # before the next one begins: what it takes is not waiting for data
        step_s = self._marks.turn_to(self._data, step)
        if self._data_s is not None:
            self._counter.add(step, self._data_s, step_s)
            compute_s = self.end_compute()
            if self._turns_here > _WARM_UP_STEPS:
                self._turns.append(Turn(self._data_s, compute_s, self._data_s + step_s))
        self._data_s = None


def _nothing() -> None:
    return None
