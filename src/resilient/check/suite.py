"""All checks of one node, in order, each within its own deadline.

They run in a process of their own, one after another: one that hangs (a device that does not answer, a mount that is
gone) or crashes is ended and reported, and the next ones run in a new process.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Final, Self

import msgspec

from resilient.check.context import Context, Level
from resilient.check.limits import Limits
from resilient.check.result import Result, Status, failed, skipped
from resilient.clock import SYSTEM_CLOCK, Clock, Deadline

Progress = Callable[[str, int, int], None]
"""Is told which check begins, how many are done, and how many there are."""

TIMEOUT_S: Final = {"light": 55.0, "full": 390.0}
"""For all checks of a level together: light within 60 s and full within 10 min (Aegis), with the pairs and to start."""

_START_S: Final = 30.0
_KILLED_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check: ``module`` has ``check(context) -> list[Result]``; deadlines in seconds."""

    name: str
    module: str
    light_s: float
    full_s: float

    def timeout_s(self, level: Level) -> float:
        return self.light_s if level == "light" else self.full_s


CHECKS: Final = (
    Check(name="shared-memory", module="resilient.check.shared_memory", light_s=5, full_s=5),
    Check(name="kernel-log", module="resilient.check.kernel_log", light_s=15, full_s=30),
    Check(name="nvidia", module="resilient.check.nvidia", light_s=25, full_s=30),
    Check(name="pcie", module="resilient.check.pcie", light_s=5, full_s=5),
    Check(name="names", module="resilient.check.names", light_s=15, full_s=30),
    Check(name="clock", module="resilient.check.timekeeping", light_s=5, full_s=5),
    Check(name="processor", module="resilient.check.processor", light_s=20, full_s=60),
    Check(name="memory", module="resilient.check.memory", light_s=15, full_s=90),
    Check(name="disk", module="resilient.check.disk", light_s=20, full_s=90),
    Check(name="store", module="resilient.check.place", light_s=25, full_s=180),
    Check(name="network", module="resilient.check.nics", light_s=10, full_s=15),
    Check(name="rdma", module="resilient.check.fabric", light_s=10, full_s=15),
    Check(name="accelerator", module="resilient.check.accelerator", light_s=40, full_s=150),
)
"""Quick ones that explain the failures of later ones come first."""


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """The worker says that it begins a check."""

    name: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The worker says what a check has found; ``end`` is the worst of all nodes, where several were checked."""

    name: str
    results: list[Result]
    end: Status = Status.OK


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker is to do: names and modules of checks, in order."""

    context: Context
    checks: list[tuple[str, str]]


def run_checks(
    level: Level = "light",
    *,
    places: Sequence[str] = (),
    limits: Limits | None = None,
    progress: Progress | None = None,
    checks: Sequence[Check] = CHECKS,
    root: str = "/",
    clock: Clock = SYSTEM_CLOCK,
) -> list[Result]:
    """Check this node; return what was found, in the order of the checks.

    Takes some seconds (``light``, at most 60 s) or some minutes (``full``, at most 10). Nothing is left behind, and no
    failure of a check is raised: what crashed or hung is among the results.

    Args:
        level: how thoroughly.
        places: directories and URLs that checkpoints go to.
        limits: instead of the usual ones.
        progress: is told how far it is.
        checks: which ones, instead of all.
        root: where ``/sys``, ``/proc`` and ``/dev`` are found.
        clock: for deadlines.
    """
    context = Context(level=level, places=tuple(places), root=root, limits=limits or Limits())
    whole = Deadline(clock, TIMEOUT_S[level])
    results: list[Result] = []
    left = list(checks)
    while left:
        left, found = _run(left, context, whole, clock, lambda name: _tell(progress, name, checks))
        results += found
    host = socket.gethostname()
    return [msgspec.structs.replace(each, node=host) for each in results]


def _tell(progress: Progress | None, name: str, checks: Sequence[Check]) -> None:
    if progress is not None:
        progress(name, [check.name for check in checks].index(name), len(checks))


def _run(
    checks: list[Check], context: Context, whole: Deadline, clock: Clock, begun: Callable[[str], None]
) -> tuple[list[Check], list[Result]]:
    """Run checks in one process until they are done or one of them has to be ended; return those that are left."""
    results: list[Result] = []
    if whole.expired:
        return [], [skipped(check.name, f"{whole.timeout_s:g} s for this level were over") for check in checks]
    with Worker("resilient.check.worker") as worker:
        worker.tell(Order(context=context, checks=[(check.name, check.module) for check in checks]))
        for index, check in enumerate(checks):
            begun(check.name)
            # What starts the process is not the first check's to pay for.
            timeout_s = min(_START_S, whole.remaining_s)
            message = worker.hear(timeout_s)
            start = clock.monotonic()
            if isinstance(message, Begun):
                timeout_s = min(check.timeout_s(context.level), whole.remaining_s)
                message = worker.hear(timeout_s)
            duration_s = clock.monotonic() - start
            if not isinstance(message, Ended):
                results.append(_ended(check, timeout_s, message, worker))
                return checks[index + 1 :], results
            results += [msgspec.structs.replace(each, duration_s=duration_s) for each in message.results]
    return [], results


def _ended(check: Check, timeout_s: float, message: Begun | Hung | None, worker: Worker) -> Result:
    """Return what to say of a check that has hung, or whose process has ended."""
    if isinstance(message, Hung):
        return failed(
            check.name,
            f"did not end in {timeout_s:.0f} s, and was ended",
            "something it uses does not answer: see the kernel log (hung task), dead mounts, the driver",
            doubtful=True,
        )
    how, last = worker.end()
    line = f"its process ended with {how}" + (f": {last}" if last else "")
    return failed(check.name, line, "see the kernel log", doubtful=True)


class Hung:
    """Nothing was heard in time."""


class Worker:
    """A process that is told one thing and answers in lines; it ends with ``with``, also if it hangs."""

    def __init__(self, module: str) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- closed with the process
        self._process = subprocess.Popen(  # noqa: S603 -- our own module
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # it may have processes of its own, which end with it
        )
        self._heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="resilient-check", daemon=True).start()

    def tell(self, order: msgspec.Struct) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already: what it says shows that
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()

    def hear(self, timeout_s: float) -> Begun | Ended | Hung | None:
        """Return its next word; `Hung` if there is none in time, None if it has ended."""
        try:
            line = self._heard.get(timeout=timeout_s)
        except queue.Empty:
            return Hung()
        return msgspec.json.decode(line, type=Begun | Ended) if line else None

    def end(self) -> tuple[str, str]:
        """Wait for the process, which has closed its output; return how it ended, and its last line of stderr."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)
        code = self._process.returncode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return how, lines[-1] if lines else ""

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # One in an uninterruptible wait (a dead mount, a driver) stays until that is over; nobody should wait for it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._errors.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._heard.put(line)
        self._heard.put(b"")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
