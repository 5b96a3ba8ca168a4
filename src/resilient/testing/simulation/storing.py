"""A store in which every operation of a simulated process lets the others go on, and may fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from random import Random  # noqa: TID251 -- the type alone: callers pass a seeded one
from typing import Final, Protocol, TypeVar

from resilient.errors import CorruptError, ErrorKind, NotFoundError, StoreError
from resilient.format import layout
from resilient.format.digest import BytesLike
from resilient.store.base import Capabilities
from resilient.testing.simulation.faults import Fates, What
from resilient.testing.simulation.scheduling import Killed, Machine, Process, Scheduler

T = TypeVar("T")

STALE_S: Final = 5.0
"""How much of the past a listing may miss."""
_TOLD: Final = 80


class Observer(Protocol):
    """Is told of every change, at the moment at which it lands."""

    def created(self, key: str, data: bytes, process: Process) -> None:
        """Take note of an object that was not there, or was replaced."""
        ...

    def deleted(self, key: str, process: Process) -> None:
        """Take note of an object that was there."""
        ...


class Disk:
    """The objects that all processes share, and a trace of what was done to them.

    ``lags``: it is a network file system, whose listings of attempts are stale, and on which a write never lands late
    over another one; else an object store, which is the other way round. Other listings are stale in any case.
    """

    def __init__(self, scheduler: Scheduler, observer: Observer, *, lags: bool = False) -> None:
        self.scheduler = scheduler
        self.lags = lags
        self.objects: dict[str, bytes] = {}
        self._folders: dict[str, dict[str, float]] = {}
        self._observer = observer
        self._trace: deque[tuple[float, str, str, str, str]] = deque(maxlen=_TOLD)
        self._network = Process(scheduler, "network", Machine("network"), str, {})

    def trace(self) -> str:
        """Return the last operations: when, who, what, and how it went."""
        return "\n".join(f"{at:10.3f} s  {who:24} {verb:7} {key}  {how}" for at, who, verb, key, how in self._trace)

    def note(self, process: Process, verb: str, key: str, how: str) -> None:
        self._trace.append((self.scheduler.now_s, process.name, verb, key, how))

    def later(self, duration_s: float, act: Callable[[], object]) -> None:
        """Let something land after its client has given up on it."""
        self.scheduler.spawn(self._network, lambda: _quietly(act), after_s=duration_s)

    def put(self, key: str, content: bytes, process: Process) -> None:
        self.objects[key] = content
        self._folders.setdefault(key.rpartition("/")[0] + "/", {}).setdefault(key, self.scheduler.now_s)
        self._observer.created(key, content, process)

    def create(self, key: str, data: bytes, process: Process) -> bool:
        found = self.objects.get(key)
        if found is None:
            self.put(key, data, process)
        return found is None or found == data

    def get(self, key: str) -> bytes:
        try:
            return self.objects[key]
        except KeyError:
            raise NotFoundError(f"there is no object {key!r}", kind=ErrorKind.NO_SUCH_OBJECT) from None

    def delete(self, key: str, process: Process) -> None:
        if self.objects.pop(key, None) is not None:
            del self._folders[key.rpartition("/")[0] + "/"][key]
            self._observer.deleted(key, process)

    def list(self, prefix: str, *, before_s: float) -> list[str]:
        """Return the keys below a prefix that were there at a time."""
        return [
            key
            for folder, keys in self._folders.items()
            if folder.startswith(prefix) or prefix.startswith(folder)
            for key, created_s in keys.items()
            if created_s <= before_s and (folder.startswith(prefix) or key.startswith(prefix))
        ]


class SimulatedStore:
    """The way of one process to the disk."""

    capabilities = Capabilities(conditional_create=True, atomic_put=True, ranged_read=True)
    url = "simulated://run"

    def __init__(self, disk: Disk, process: Process, fates: Fates, rng: Random) -> None:
        self._disk = disk
        self._process = process
        self._fates = fates
        self._rng = rng

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        content = b"".join(parts)
        self._operate("put", key, lambda: self._disk.put(key, content, self._process))

    def create(self, key: str, data: bytes) -> bool:
        return self._operate("create", key, lambda: self._disk.create(key, data, self._process))

    def get(self, key: str) -> bytes:
        return self._operate("get", key, lambda: self._disk.get(key))

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        content = self.get(key)[start : start + into.nbytes]
        if len(content) != into.nbytes:
            raise CorruptError(f"object {key!r} is shorter than {start + into.nbytes}", kind=ErrorKind.MALFORMED)
        into.cast("B")[:] = content

    def size(self, key: str) -> int:
        return len(self._operate("size", key, lambda: self._disk.get(key)))

    def list(self, prefix: str) -> Iterator[str]:
        stale_s = max(0.0, self._rng.random() * 2 - 1) * STALE_S
        if prefix == layout.STEPS and not self._disk.lags:
            stale_s = 0.0
        clock = self._process.scheduler
        return iter(self._operate("list", prefix, lambda: self._disk.list(prefix, before_s=clock.now_s - stale_s)))

    def folders(self, prefix: str) -> Iterator[str]:
        below = (key.removeprefix(prefix) for key in self.list(prefix))
        return iter(dict.fromkeys(rest.partition("/")[0] for rest in below if "/" in rest))

    def delete(self, key: str) -> None:
        self._operate("delete", key, lambda: self._disk.delete(key, self._process))

    def close(self) -> None:
        """Nothing to give back."""

    def _operate(self, verb: str, key: str, act: Callable[[], T]) -> T:
        """Let others go on, then carry an operation out, or not: at one moment, as seen by all."""
        process, disk = self._process, self._disk
        scheduler = process.scheduler
        if process.dead:
            raise Killed
        process.operations += 1
        delay_s, what, lasts_s = self._fates(process, verb, key)
        if what is What.LATE and verb == "put" and key.startswith(layout.GENERATIONS) and disk.lags:
            what = What.REFUSED
        if what is not None:
            disk.note(process, verb, key, f"{what} ({lasts_s:.1f} s)")
            self._befalls(what, lasts_s, act)
        scheduler.pause(delay_s)
        if process.machine.cut_off_until_s > scheduler.now_s:
            disk.note(process, verb, key, "cut off")
            raise _away(verb, key)
        if what is What.REFUSED or what is What.LATE:
            raise _away(verb, key)
        try:
            result = act()
        except NotFoundError:
            disk.note(process, verb, key, "not there")
            raise
        disk.note(process, verb, key, "" if result is None or isinstance(result, bytes | list) else str(result))
        if what is What.DIES_AFTER:
            process.die()
            raise Killed
        if what is What.LOST:
            raise _away(verb, key)
        return result

    def _befalls(self, what: What, lasts_s: float, act: Callable[[], object]) -> None:
        process = self._process
        if what is What.DIES:
            process.die()
            raise Killed
        if what is What.STALLS:
            process.freeze(lasts_s)
        elif what is What.CUT_OFF:
            process.machine.cut_off_until_s = process.scheduler.now_s + lasts_s
        elif what is What.LATE:
            self._disk.later(lasts_s, act)


def _away(verb: str, key: str) -> StoreError:
    return StoreError(f"{verb} of {key!r}: no answer", kind=ErrorKind.UNREACHABLE, retryable=True)


def _quietly(act: Callable[[], object]) -> None:
    with suppress(NotFoundError):  # nobody waits for the answer
        act()
