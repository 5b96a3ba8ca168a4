"""Who goes on when: tasks that take turns in one thread, and time that passes only while all of them wait."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, Final

from resilient.catalog.process import playing
from resilient.errors import ErrorKind, UsageError

_START: Final = datetime(2026, 1, 1, tzinfo=UTC)


class Killed(BaseException):
    """Unwinds the task of a process that has died; nothing that it still does has any effect."""


class Scheduler:
    """Runs one task at a time, until it waits; the next one is the one that is due first."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._greenlet = _greenlet()
        self._hub: Any = None
        self._order = count()
        self._due: list[tuple[float, int, Task]] = []
        self._running: Task | None = None

    def spawn(self, process: Process, body: Callable[[], None], *, after_s: float = 0.0) -> None:
        """Have a process run ``body``, beside whatever else it does."""
        self._push(self.now_s + after_s, Task(process, _in_process(process, body)))

    def pause(self, duration_s: float) -> None:
        """Let others go on; the running task is due again after so many seconds.

        Raises:
            Killed: its process has died, or the simulation is over.
        """
        task = self._running
        assert task is not None, "only a task can wait"
        if task.process.dead:
            raise Killed
        due_s = self.now_s + duration_s
        if (self._due and self._due[0][0] <= due_s) or task.process.frozen_until_s > due_s:
            self._push(due_s, task)
            self._hub.switch()
        else:
            self.now_s = due_s  # nobody else would have done anything meanwhile

    def run(self) -> None:
        """Go on until no task is left; what a task raises comes out here, and ends all others."""
        self._hub = self._greenlet.getcurrent()
        try:
            while self._due:
                due_s, _, task = heapq.heappop(self._due)
                process = task.process
                if process.dead:
                    self._kill(task)
                elif process.frozen_until_s > due_s:
                    self._push(process.frozen_until_s, task)
                else:
                    self.now_s = due_s
                    self._running = task
                    if task.stack is None:
                        task.stack = self._greenlet.greenlet(task.body, self._hub)
                    task.stack.switch()
        finally:
            for _, _, task in self._due:
                task.process.die()
                self._kill(task)
            self._due.clear()

    def _push(self, due_s: float, task: Task) -> None:
        heapq.heappush(self._due, (due_s, next(self._order), task))

    def _kill(self, task: Task) -> None:
        if task.stack is not None:
            self._running = task
            task.stack.throw(Killed)


class Task:
    """What a process is doing; once it has begun, it has a stack of its own."""

    __slots__ = ("body", "process", "stack")

    def __init__(self, process: Process, body: Callable[[], None]) -> None:
        self.process = process
        self.body = body
        self.stack: Any = None


class Machine:
    """What simulated processes share: a name, and the way to the store."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cut_off_until_s = 0.0


class Process:
    """A simulated process, which may die, stall, and be cut off from the store; also its clock.

    It is one of `resilient.catalog.process.Simulated`: the catalogue takes it for the process that it runs in.
    """

    def __init__(
        self, scheduler: Scheduler, name: str, machine: Machine, token: Callable[[], str], known: dict[str, Process]
    ) -> None:
        self.scheduler = scheduler
        self.name = name
        self.machine = machine
        self.token = token
        self.dead = False
        self.sound = False  # nothing befalls it
        self.frozen_until_s = 0.0
        self.operations = 0
        self._known = known
        known[name] = self

    @property
    def host(self) -> str:
        return self.machine.name

    @property
    def started(self) -> str:
        return self.name

    def lives(self, other_host: str, other_started: str) -> bool | None:
        other = self._known.get(other_started)
        return None if other_host != self.host or other is None else not other.dead

    def die(self) -> None:
        """Be gone, between two operations and for good."""
        self.dead = True

    def freeze(self, duration_s: float) -> None:
        """Do nothing for so long, and then go on as if nothing had been: a stopped process, a hung machine."""
        self.frozen_until_s = max(self.frozen_until_s, self.scheduler.now_s + duration_s)

    def now(self) -> datetime:
        return _START + timedelta(seconds=self.scheduler.now_s)

    def monotonic(self) -> float:
        return self.scheduler.now_s

    def sleep(self, duration_s: float) -> None:
        self.scheduler.pause(duration_s)


def _in_process(process: Process, body: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        try:
            with playing(process):
                body()
        except Killed:
            pass  # that was all of it

    return run


def _greenlet() -> Any:
    try:
        import greenlet  # noqa: PLC0415 -- only simulations need it
    except ImportError as error:
        raise UsageError(
            "a simulated cluster needs the package greenlet",
            kind=ErrorKind.MISSING_EXTRA,
            hint="pip install 'resilient-torch[testing]'",
        ) from error
    return greenlet
