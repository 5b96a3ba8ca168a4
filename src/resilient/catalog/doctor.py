"""Whether a store keeps what the promises of this package rest on."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol, runtime_checkable

from resilient.catalog.once import read_or_none
from resilient.clock import SYSTEM_CLOCK, Clock, Deadline
from resilient.errors import CorruptError, ErrorKind, NotFoundError, ResilientError, StoreError
from resilient.format.layout import CONTROL
from resilient.store.base import Store
from resilient.store.probe import TIMEOUT_S
from resilient.store.retrying import Retrying

_RACERS = 6
_RACES = 3
_LISTED = 40
_KEPT = 20
_LISTING_TIMEOUT_S = 10.0
_SKEW_S = 60.0  # beyond 15 minutes S3 refuses signatures; between the two, times in reports only look odd

_UNUSUAL: Final = ("with space", "plus+", "per%25cent", "equals=", "größe-日本", "a.b~c,d;e'f")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found; ``detail`` is for people.

    ``promise`` is the one that falls where ``ok`` is false. Where ``limited`` is true, the store works, and cannot keep
    that promise in the case that ``detail`` names.
    """

    name: str
    ok: bool
    detail: str
    promise: str
    limited: bool = False


@runtime_checkable
class _Timed(Protocol):
    """A store that shows its own clock."""

    def written_at(self, key: str) -> datetime: ...


@runtime_checkable
class _Around(Protocol):
    """A store that adds something to another."""

    @property
    def inner(self) -> Store: ...


class _BrokenError(Exception):
    """A check did not find what it must."""


class _LimitedError(Exception):
    """A check found that something is not promised, and that saving works without it."""


class _Bench:
    """A corner of the store to try things in, which remembers what is to be removed."""

    def __init__(self, store: Store, clock: Clock, reopen: Callable[[], Store] | None) -> None:
        self.store = store
        self.clock = clock
        self.reopen = reopen
        self.prefix = f"{CONTROL}doctor-{secrets.token_hex(8)}/"
        self.used: set[str] = set()

    def key(self, name: str) -> str:
        key = self.prefix + name
        self.used.add(key)
        return key

    def clear(self) -> None:
        for key in {*self.used, *self.store.list(self.prefix)}:
            self.store.delete(key)


def examine(
    store: Store,
    *,
    clock: Clock = SYSTEM_CLOCK,
    progress: Callable[[int, int], None] | None = None,
    reopen: Callable[[], Store] | None = None,
) -> tuple[Finding, ...]:
    """Try everything that saving and resuming need from ``store``, and remove all of it again.

    The first finding says whether the store can be used at all; without that there are no others. ``progress`` is told
    how many checks of how many are done. ``reopen`` opens the same place once more, as another process would: what one
    instance only remembers, the other does not find. It is closed here.
    """
    bench = _Bench(_quick(store), clock, reopen)
    findings: list[Finding] = []
    try:
        for done, (name, promise, check) in enumerate(_CHECKS):
            if progress is not None:
                progress(done, len(_CHECKS))
            findings.append(_found(name, promise, check, bench))
            if not findings[0].ok:
                break
    finally:
        findings.append(_found("clean-up", "G11", _clear, bench))
    if progress is not None:
        progress(len(_CHECKS), len(_CHECKS))
    return tuple(findings if findings[0].ok else findings[:1])


def _quick(store: Store) -> Store:
    return store.within(TIMEOUT_S) if isinstance(store, Retrying) else store


def _found(name: str, promise: str, check: Callable[[_Bench], str], bench: _Bench) -> Finding:
    try:
        return Finding(name=name, ok=True, detail=check(bench), promise=promise)
    except _LimitedError as error:
        return Finding(name=name, ok=True, detail=str(error), promise=promise, limited=True)
    except _BrokenError as error:
        detail = str(error)
    except ResilientError as error:
        detail = str(error) if error.hint is None else f"{error} ({error.hint})"
    return Finding(name=name, ok=False, detail=detail, promise=promise)


def _access(bench: _Bench) -> str:
    store = bench.store
    for _ in store.folders(""):
        break
    key = bench.key("access")
    store.put(key, [b"x"])
    if store.get(key) != b"x" or store.size(key) != 1:
        raise _BrokenError("what was put is not what is read")
    store.delete(key)
    return "list, put, get, delete"


def _one_winner(bench: _Bench) -> str:
    for turn in range(_RACES):
        key = bench.key(f"race-{turn}")
        gate = threading.Barrier(_RACERS, timeout=_LISTING_TIMEOUT_S)

        def claim(racer: int, key: str = key, gate: threading.Barrier = gate) -> bool:
            gate.wait()
            return bench.store.create(key, b"racer %d" % racer)

        with ThreadPoolExecutor(_RACERS) as pool:
            won = list(pool.map(claim, range(_RACERS)))
        if bench.store.get(key) not in [b"racer %d" % racer for racer in range(_RACERS) if won[racer]]:
            raise _BrokenError("the object that is there is not that of one who was told to have won")
        if won.count(True) != 1 and bench.store.capabilities.conditional_create:
            raise _BrokenError(
                f"{won.count(True)} of {_RACERS} writers were told that they had created the same object"
            )
    if not bench.store.capabilities.conditional_create:
        raise _LimitedError(
            "this kind of store does not decide between two writers: attempts of unique names and reading back make it "
            "safe for one launch of a run at a time; if two start or commit at the same moment, both may believe that "
            "they won, and what the one saved may not count"
        )
    return f"one winner in each of {_RACES} races of {_RACERS}"


def _own_write(bench: _Bench) -> str:
    key = bench.key("own")
    if not bench.store.create(key, b"mine"):
        raise _BrokenError("an object that nobody had created was said to be there")
    if not bench.store.create(key, b"mine"):
        raise _BrokenError("a repeated create did not recognize its own object")
    if bench.store.create(key, b"theirs") or bench.store.get(key) != b"mine":
        raise _BrokenError("a second create replaced the first one's object")
    return "a repeated create finds its own object and keeps others'"


def _read_after_write(bench: _Bench) -> str:
    for turn in range(10):
        content = b"%d" % turn
        fresh, same = bench.key(f"fresh-{turn}"), bench.key("overwritten")
        bench.store.put(fresh, [content])
        bench.store.put(same, [content])
        if bench.store.get(fresh) != content:
            raise _BrokenError("a new object did not read as it was written")
        if bench.store.get(same) != content:
            raise _BrokenError("after an overwrite the old content was read")
    return "new and overwritten objects read as written, 10 times each"


def _kept(bench: _Bench) -> str:
    """Look whether what was acknowledged is there, once all of it was written, and from a connection of its own."""
    kept = {bench.key(f"kept/{index}"): secrets.token_bytes(64) for index in range(_KEPT)}
    for index, (key, content) in enumerate(kept.items()):
        if index % 2:
            bench.store.put(key, [b"what is overwritten"])
            bench.store.put(key, [content])
        elif not bench.store.create(key, content):
            raise _BrokenError("an object that nobody had created was said to be there")
    if bench.reopen is None:
        _check_kept(bench.store, kept)
        return f"{_KEPT} objects stay (looked at through the connection that wrote them)"
    another = _quick(bench.reopen())
    try:
        _check_kept(another, kept)
    finally:
        another.close()
    return f"{_KEPT} objects, overwritten ones too, are there for another connection"


def _check_kept(store: Store, kept: Mapping[str, bytes]) -> None:
    lost = [key for key, content in kept.items() if read_or_none(store, key) != content]
    if lost:
        raise _BrokenError(
            f"the store loses acknowledged writes: of {len(kept)} objects that it said to have stored, {len(lost)} are "
            "not there as they were written; a step that was reported as saved may be gone or torn"
        )


def _ranges(bench: _Bench) -> str:
    key, content = bench.key("ranges"), secrets.token_bytes(1 << 20)
    bench.store.put(key, [content[:1000], content[1000:]])
    for start, nbytes in ((0, 1), (0, len(content)), (4_095, 4_098), (len(content) - 1, 1)):
        into = bytearray(nbytes)
        bench.store.read_into(key, start, memoryview(into))
        if into != content[start : start + nbytes]:
            raise _BrokenError(f"bytes {start} to {start + nbytes} of an object are not those that were written")
    try:
        bench.store.read_into(key, len(content) - 1, memoryview(bytearray(2)))
    except CorruptError:
        return "ranges of 1 MiB, its ends included; reading past the end is noticed"
    raise _BrokenError("reading past the end of an object was not noticed")


def _listing(bench: _Bench) -> str:
    wanted = {bench.key(f"listed/{index % 4}/{index}") for index in range(_LISTED)}
    for key in wanted:
        bench.store.put(key, [b""])
    prefix = bench.prefix + "listed/"
    deadline = Deadline(bench.clock, _LISTING_TIMEOUT_S)
    while (listed := sorted(bench.store.list(prefix))) != sorted(wanted):
        if deadline.expired:
            raise _BrokenError(f"{len(listed)} keys are listed {_LISTING_TIMEOUT_S:g} s after {_LISTED} were put")
        bench.clock.sleep(0.2)
    if sorted(bench.store.folders(prefix)) != ["0", "1", "2", "3"]:
        raise _BrokenError("the folders of a prefix are not listed as they are")
    return f"{_LISTED} keys in 4 folders, complete after they were put"


def _deleting(bench: _Bench) -> str:
    key = bench.key("deleted")
    bench.store.put(key, [b"x"])
    bench.store.delete(key)
    bench.store.delete(key)
    try:
        bench.store.get(key)
    except NotFoundError:
        pass
    else:
        raise _BrokenError("a deleted object can still be read")
    if key in set(bench.store.list(bench.prefix)):
        raise _BrokenError("a deleted object is still listed")
    if not bench.store.create(key, b"again"):
        raise _BrokenError("a deleted object cannot be created again")
    return "gone at once; deleting twice is no error"


def _names(bench: _Bench) -> str:
    keys = {bench.key(f"names/{name}/{name}"): name.encode() for name in _UNUSUAL}
    for key, content in keys.items():
        bench.store.put(key, [content])
    for key, content in keys.items():
        if bench.store.get(key) != content:
            raise _BrokenError(f"{key!r} reads as another object")
    if set(bench.store.list(bench.prefix + "names/")) != set(keys):
        raise _BrokenError("unusual names are not listed as they were given")
    return "blanks, signs and letters of any language"


def _time(bench: _Bench) -> str:
    inner = bench.store
    while isinstance(inner, _Around):
        inner = inner.inner
    if not isinstance(inner, _Timed):
        return "not observable"
    key = bench.key("time")
    bench.store.put(key, [b""])
    skew_s = abs((inner.written_at(key) - bench.clock.now()).total_seconds())
    if skew_s > _SKEW_S:
        return f"warning: the clocks of the store and of this machine are {skew_s:.0f} s apart"
    return "agrees with this machine's"


def _clear(bench: _Bench) -> str:
    if not bench.used:
        return "nothing was written"
    bench.clear()
    if left := list(bench.store.list(bench.prefix)):
        raise StoreError(f"{len(left)} objects stay under {bench.prefix}", kind=ErrorKind.UNTRUSTWORTHY_STORE)
    return "nothing stays"


_CHECKS: Final[tuple[tuple[str, str, Callable[[_Bench], str]], ...]] = (
    ("access", "G15", _access),
    ("create-if-absent under a race", "G12", _one_winner),
    ("create recognizes its own", "G1", _own_write),
    ("read after write", "G1", _read_after_write),
    ("acknowledged writes stay", "G1", _kept),
    ("ranged read", "G2", _ranges),
    ("list after write", "G11", _listing),
    ("delete", "G11", _deleting),
    ("unusual names", "G1", _names),
    ("clock", "", _time),
)
