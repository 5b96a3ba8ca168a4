"""A store that fails when and how it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final, NoReturn, TypeVar

from resilient.clock import SYSTEM_CLOCK, Clock, Deadline
from resilient.errors import ErrorKind, NotFoundError, StoreError, UsageError
from resilient.format.digest import BytesLike, digest
from resilient.store.base import Capabilities, Store

T = TypeVar("T")

WRITES: Final = frozenset({"put", "create", "delete"})
READS: Final = frozenset({"get", "read_into"})
LISTS: Final = frozenset({"list", "folders"})
VERBS: Final = WRITES | READS | LISTS | {"size"}

HANG_TIMEOUT_S: Final = 60.0
"""How long an operation hangs or stalls at most, unless ``delay_s`` says otherwise."""

_POLL_S = 0.01


class Crashed(BaseException):
    """The process that used the store is dead: no ``except Exception`` of the code under test may survive it."""


class Mode(StrEnum):
    """What happens to an operation."""

    FAIL = "fail"
    """A retryable error; nothing was done."""
    FAIL_FOR_GOOD = "fail-for-good"
    """An error that is not retryable; nothing was done."""
    THROTTLE = "throttle"
    """503 SlowDown: a retryable error of kind ``throttled``; nothing was done."""
    EXPIRED = "expired"
    """The credentials have expired (kind ``bad-credentials``, not retryable); nothing was done."""
    DENIED = "denied"
    """The operation is forbidden (kind ``access-denied``, not retryable); nothing was done."""
    NO_SPACE = "no-space"
    """The store is full (not retryable); nothing was stored. Puts and creates only."""
    HANG = "hang"
    """Nothing happens until `FaultyStore.release`, or until a deadline (``delay_s``, or a minute); then it fails."""
    STALL = "stall"
    """As HANG, but afterwards it is done as if nothing had been: a writer that was frozen and wakes up late."""
    DELAY = "delay"
    """Done after ``delay_s``."""
    TEAR = "tear"
    """Half of the object is stored, then a retryable error; nothing is stored if the store has ``atomic_put``."""
    LOSE_RESPONSE = "lose-response"
    """Done; the answer is a retryable error."""
    DROP_UNSYNCED = "drop-unsynced"
    """Done and acknowledged, and undone by `FaultyStore.crash`: a store or disk that loses acknowledged writes."""
    STALE_LIST = "stale-list"
    """A listing as of an earlier moment: without the newest ``stale_keys`` changes below the prefix."""
    SHORT_READ = "short-read"
    """Only the first half arrives, and nobody says so."""
    CORRUPT_READ = "corrupt-read"
    """One bit of what arrives is flipped."""
    CRASH = "crash"
    """`Crashed` is raised, by this and by every later operation: the process is dead, what it had stored is there."""


_ONLY: Final = {
    Mode.NO_SPACE: frozenset({"put", "create"}),
    Mode.TEAR: frozenset({"put", "create"}),
    Mode.DROP_UNSYNCED: WRITES,
    Mode.STALE_LIST: LISTS,
    Mode.SHORT_READ: READS,
    Mode.CORRUPT_READ: READS,
}
"""The operations that a mode means something for; it matches no others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """From the ``at``-th operation that matches on (counted from 1), ``times`` of them are hit; None: all that follow.

    An operation matches if its verb is among ``verbs`` (None: any that ``mode`` means something for), and its key or
    prefix matches the pattern ``key`` (``*`` also matches ``/``). A mode that fails waits ``delay_s`` before.
    """

    mode: Mode
    at: int = 1
    times: int | None = 1
    verbs: AbstractSet[str] | None = None
    key: str = "*"
    delay_s: float = 0
    stale_keys: int = 1

    def __post_init__(self) -> None:
        unknown = sorted(set(self.verbs or ()) - _ONLY.get(self.mode, VERBS))
        if unknown:
            raise UsageError(
                f"a fault {self.mode.value!r} never hits {', '.join(unknown)}",
                kind=ErrorKind.INVALID_ARGUMENT,
                hint=f"it can hit {', '.join(sorted(_ONLY.get(self.mode, VERBS)))}",
            )
        if self.at < 1 or (self.times is not None and self.times < 1) or self.delay_s < 0 or self.stale_keys < 1:
            raise UsageError(
                f"operations are counted from 1, and something must be hit: {self}", kind=ErrorKind.INVALID_ARGUMENT
            )

    def matches(self, verb: str, key: str) -> bool:
        """Say whether an operation counts for this fault."""
        return verb in (self.verbs or _ONLY.get(self.mode, VERBS)) and fnmatchcase(key, self.key)


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a store; ``number`` counts from 1; of ``list`` and ``folders``, ``key`` is the prefix."""

    number: int
    verb: str
    key: str


@dataclass(frozen=True, slots=True)
class _Change:
    """When a key came, or went, as the number of the operation."""

    number: int
    here: bool


class _Armed:
    """A fault, and how many operations it has seen that match."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._seen = 0

    def hits(self, verb: str, key: str) -> bool:
        fault = self.fault
        if not fault.matches(verb, key):
            return False
        self._seen += 1
        return self._seen >= fault.at and (fault.times is None or self._seen < fault.at + fault.times)


class FaultyStore:
    """``inner``, with ``faults``; thread-safe, and the same calls fail in the same way each time.

    `operations` says what was called, and `fired` how often a fault hit: a test that tries each N enumerates until
    nothing was hit any more::

        for number in itertools.count(1):
            store = FaultyStore(MemoryStore(), Fault(mode=Mode.FAIL, at=number))
            ...
            if not store.fired:
                break

    Several faults may hit one operation: those that fail it beforehand come first, in the order given.

    Args:
        inner: where things are stored.
        faults: what happens when; `inject` adds others later.
        clock: what delays and hanging are measured with.
    """

    def __init__(self, inner: Store, *faults: Fault, clock: Clock = SYSTEM_CLOCK) -> None:
        self._inner = inner
        self._clock = clock
        self._lock = threading.Lock()
        self._armed = [_Armed(fault) for fault in faults]
        self._operations: list[Operation] = []
        self._fired = 0
        self._stuck = 0
        self._release = threading.Event()
        self._dead = False
        self._before: dict[str, bytes | None] = {}  # what was there before changes that a crash undoes
        self._changed: dict[str, _Change] = {}

    @property
    def inner(self) -> Store:
        """The store around which this one is: what is there "after a restart"."""
        return self._inner

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    @property
    def operations(self) -> tuple[Operation, ...]:
        """All calls so far, also those that failed."""
        with self._lock:
            return tuple(self._operations)

    @property
    def fired(self) -> int:
        """How often a fault has hit an operation."""
        return self._fired

    @property
    def stuck(self) -> int:
        """How many operations hang or stall at this moment."""
        return self._stuck

    def inject(self, *faults: Fault) -> None:
        """Add faults; they count operations from now on."""
        with self._lock:
            self._armed.extend(_Armed(fault) for fault in faults)

    def heal(self) -> None:
        """Remove all faults, and let go what hangs. What a crash undoes stays undoable, and a dead process dead."""
        with self._lock:
            self._armed.clear()
        self.release()

    def release(self) -> None:
        """Let go what hangs or stalls now; later ones wait anew."""
        with self._lock:
            event, self._release = self._release, threading.Event()
        event.set()

    def crash(self) -> None:
        """Take back what `Mode.DROP_UNSYNCED` acknowledged, as a power failure does; the store works on."""
        with self._lock:
            lost, self._before = self._before, {}
        for key, content in lost.items():
            if content is None:
                self._inner.delete(key)
            else:
                self._inner.put(key, [content])

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        def tear() -> None:
            content = b"".join(parts)
            self._inner.put(key, [content[: len(content) // 2]])

        self._write("put", key, lambda: self._inner.put(key, parts), tear)

    def create(self, key: str, data: bytes) -> bool:
        return self._write(
            "create",
            key,
            lambda: self._inner.create(key, data),
            lambda: self._inner.put(key, [data[: len(data) // 2]]),
        )

    def delete(self, key: str) -> None:
        self._write("delete", key, lambda: self._inner.delete(key), lambda: None)

    def get(self, key: str) -> bytes:
        operation, faults = self._begin("get", key)
        content = bytearray(self._inner.get(key))
        if Mode.SHORT_READ in _modes(faults):
            del content[len(content) // 2 :]
        if Mode.CORRUPT_READ in _modes(faults):
            _flip(memoryview(content), operation)
        self._end(operation, faults)
        return bytes(content)

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        operation, faults = self._begin("read_into", key)
        view = into.cast("B")
        short = Mode.SHORT_READ in _modes(faults)
        self._inner.read_into(key, start, view[: view.nbytes // 2] if short else view)
        if Mode.CORRUPT_READ in _modes(faults):
            _flip(view, operation)
        self._end(operation, faults)

    def size(self, key: str) -> int:
        operation, faults = self._begin("size", key)
        nbytes = self._inner.size(key)
        self._end(operation, faults)
        return nbytes

    def list(self, prefix: str) -> Iterator[str]:
        operation, faults = self._begin("list", prefix)
        keys = tuple(self._inner.list(prefix))
        for fault in faults:
            if fault.mode is Mode.STALE_LIST:
                keys = self._as_before(prefix, keys, fault.stale_keys)
        self._end(operation, faults)
        return iter(keys)

    def folders(self, prefix: str) -> Iterator[str]:
        operation, faults = self._begin("folders", prefix)
        found = tuple(self._inner.folders(prefix))
        for fault in faults:
            if fault.mode is Mode.STALE_LIST:
                keys = self._as_before(prefix, tuple(self._inner.list(prefix)), fault.stale_keys)
                below = (key.removeprefix(prefix) for key in keys)
                found = tuple({rest.partition("/")[0] for rest in below if "/" in rest})
        self._end(operation, faults)
        return iter(found)

    def close(self) -> None:
        """Let go what hangs, and close the inner store."""
        self.release()
        self._inner.close()

    def _begin(self, verb: str, key: str) -> tuple[Operation, tuple[Fault, ...]]:
        """Count an operation, and return the faults that hit it, those that fail it beforehand having done so."""
        with self._lock:
            operation = Operation(len(self._operations) + 1, verb, key)
            self._check_alive(operation)
            self._operations.append(operation)
            faults = tuple(armed.fault for armed in self._armed if armed.hits(verb, key))
            self._fired += len(faults)
            self._dead = Mode.CRASH in _modes(faults)
            release = self._release
        self._check_alive(operation)
        for fault in faults:
            if fault.mode in {Mode.HANG, Mode.STALL}:
                self._wait(fault.delay_s or HANG_TIMEOUT_S, release)
                self._check_alive(operation)
            elif fault.delay_s:
                self._clock.sleep(fault.delay_s)
            if fault.mode in _BEFOREHAND or (fault.mode is Mode.TEAR and self.capabilities.atomic_put):
                self._refuse(fault.mode, operation)
        return operation, faults

    def _check_alive(self, operation: Operation) -> None:
        if self._dead:
            raise Crashed(f"the process died before {operation.verb} of {operation.key!r} in {self.url}")

    def _wait(self, timeout_s: float, release: threading.Event) -> None:
        deadline = Deadline(self._clock, timeout_s)
        with self._lock:
            self._stuck += 1
        try:
            while not release.is_set() and not deadline.expired:
                self._clock.sleep(min(_POLL_S, deadline.remaining_s))
        finally:
            with self._lock:
                self._stuck -= 1

    def _end(self, operation: Operation, faults: Iterable[Fault]) -> None:
        """Fail an operation that is done, if a fault wants that."""
        if Mode.LOSE_RESPONSE in _modes(faults):
            self._refuse(Mode.LOSE_RESPONSE, operation)

    def _refuse(self, mode: Mode, operation: Operation) -> NoReturn:
        why, kind, retryable = _REFUSALS[mode]
        raise StoreError(
            f"{operation.verb} of {operation.key!r} in {self.url}: {why} (injected fault {mode.value!r}, "
            f"operation {operation.number})",
            kind=kind,
            retryable=retryable,
        )

    def _write(self, verb: str, key: str, act: Callable[[], T], tear: Callable[[], None]) -> T:
        operation, faults = self._begin(verb, key)
        modes = _modes(faults)
        known = bool(modes & {Mode.TEAR, Mode.DROP_UNSYNCED}) or key in self._before
        before = self._peek(key) if known else None
        kept = verb == "create" and before is not None  # what is there already stays
        if Mode.TEAR in modes:
            if not kept:
                tear()
                self._note(operation)
            self._refuse(Mode.TEAR, operation)
        answer = act()
        if answer is not False:
            self._note(operation)
        if known and not kept:
            self._sync(key, before, lost=Mode.DROP_UNSYNCED in modes)
        self._end(operation, faults)
        return answer

    def _peek(self, key: str) -> bytes | None:
        try:
            return self._inner.get(key)
        except NotFoundError:
            return None

    def _sync(self, key: str, before: bytes | None, *, lost: bool) -> None:
        """Remember what a change has replaced, if a crash undoes it; forget it if the change is durable."""
        with self._lock:
            if lost:
                self._before.setdefault(key, before)
            else:
                self._before.pop(key, None)

    def _note(self, operation: Operation) -> None:
        """Remember when a key came, or went."""
        here = operation.verb != "delete"
        with self._lock:
            last = self._changed.get(operation.key)
            if (last is not None and last.here) != here:
                self._changed[operation.key] = _Change(operation.number, here)

    def _as_before(self, prefix: str, keys: tuple[str, ...], count: int) -> tuple[str, ...]:
        """Return a listing without its newest ``count`` changes.

        What others have stored counts as older than all that went through this store, in the order of the keys.
        """
        with self._lock:
            changes = {key: change for key, change in self._changed.items() if key.startswith(prefix)}
        changed = {key: change.number for key, change in changes.items()}
        gone = {key for key, change in changes.items() if not change.here}.difference(keys)
        newest = sorted({*keys, *gone}, key=lambda key: (changed.get(key, 0), key))[-count:]
        return (*(key for key in keys if key not in newest), *(key for key in newest if key in gone))


_REFUSALS: Final = {
    Mode.FAIL: ("an error that may pass", ErrorKind.IO, True),
    Mode.FAIL_FOR_GOOD: ("an error that stays", ErrorKind.IO, False),
    Mode.THROTTLE: ("503 SlowDown", ErrorKind.THROTTLED, True),
    Mode.EXPIRED: ("the credentials have expired", ErrorKind.BAD_CREDENTIALS, False),
    Mode.DENIED: ("access denied", ErrorKind.ACCESS_DENIED, False),
    Mode.NO_SPACE: ("no space left", ErrorKind.NO_SPACE, False),
    Mode.HANG: ("no answer in time", ErrorKind.DEADLINE, True),
    Mode.TEAR: ("the connection broke half-way", ErrorKind.IO, True),
    Mode.LOSE_RESPONSE: ("the answer was lost", ErrorKind.UNREACHABLE, True),
}
_BEFOREHAND: Final = _REFUSALS.keys() - {Mode.TEAR, Mode.LOSE_RESPONSE}


def _modes(faults: Iterable[Fault]) -> set[Mode]:
    return {fault.mode for fault in faults}


def _flip(view: memoryview, operation: Operation) -> None:
    """Flip the bit that key and number of the operation choose."""
    if view.nbytes:
        chosen = int.from_bytes(digest(f"{operation.key}#{operation.number}".encode())[:8])
        view[chosen // 8 % view.nbytes] ^= 1 << chosen % 8
