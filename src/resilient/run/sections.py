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


class NoMarks:
    """Marks of a rank that nobody watches: times alone."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._started_s = clock.monotonic()

    def section(self, name: str) -> int:  # noqa: ARG002 -- as `Marks`
        return 0

    def turn_to(self, section: int, step: int) -> float:  # noqa: ARG002 -- as `Marks`
        before_s, self._started_s = self._started_s, self._clock.monotonic()
        return self._started_s - before_s

    def enter(self, section: int) -> None:
        pass

    def leave(self) -> float:
        return 0.0


class Turn(NamedTuple):
    """How long one turn of the loop took, in seconds: waiting for its batch, computing, and all of its step.

    ``compute_s``: from the batch to the first gradient, on this rank alone; None if it cannot be told.
    """

    data_s: float
    compute_s: float | None
    step_s: float


class Sections:
    """The sections of one life of a rank; for the training thread, but for `take`."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._name = ""
        self._turns_here = 0
        self._data_s: float | None = None
        self._turns: deque[Turn] = deque(maxlen=_MOST_TURNS)
        self._data, self._outside = marks.section(DATA), marks.section(OUTSIDE)
        self._first, self._warm_up, self._step = (marks.section(name) for name in (FIRST, WARM_UP, STEP))
        self.begin_compute: Callable[[], None] = _nothing
        self.end_compute: Callable[[], float | None] = _nothing
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
            self.begin_compute()
            yield batch
            self._end_turn(step())

    def outside(self, step: int) -> None:
        """Be outside of any loop."""
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
        step_s = self._marks.turn_to(self._data, step)
        if self._data_s is not None:
            compute_s = self.end_compute()
            if self._turns_here > _WARM_UP_STEPS:
                self._turns.append(Turn(self._data_s, compute_s, self._data_s + step_s))
        self._data_s = None


def _nothing() -> None:
    return None
