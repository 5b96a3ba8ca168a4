"""What lies in a run: every object, by what it is for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from resilient.catalog.contents import open_manifest
from resilient.catalog.generations import read_claim
from resilient.catalog.line import Line
from resilient.catalog.marks import FAILED
from resilient.catalog.parallel import each
from resilient.errors import CorruptError, NotFoundError
from resilient.format import layout
from resilient.format.documents import Commit
from resilient.format.layout import Attempt
from resilient.store.base import Store

RUN: Final = "run"
COMMITTED: Final = "committed"
REFERENCED: Final = "referenced"
UNFINISHED: Final = "unfinished"
TORN: Final = "torn"
ORPHANED: Final = "orphaned"
UNKNOWN: Final = "unknown"
KINDS: Final = (RUN, COMMITTED, REFERENCED, UNFINISHED, TORN, ORPHANED, UNKNOWN)
"""Of the run as a whole; of checkpoints that count; data of others that these need; of saves that may be under way; of
checkpoints whose COMMIT is damaged; of saves that can never count, to be collected; of none of these."""

_NEWEST: Final = 5
"""For how many checkpoints it is said what their loss would mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much there is of something."""

    objects: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """An attempt that does not count. ``complete``: every rank's receipt is there, and it would count if adopted."""

    attempt: Attempt
    kind: str
    complete: bool
    amount: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What the loss of one attempt's objects would mean.

    ``takes``: the steps that could not be restored any more, newest first. ``left``: from which step the run would go
    on then; None: from none.
    """

    attempt: Attempt
    takes: tuple[int, ...]
    left: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What lies in a run; ``unknown``: keys that no writer of this format has made."""

    amounts: Mapping[str, Amount]
    apart: tuple[Apart, ...]
    losses: tuple[Loss, ...]
    unknown: tuple[str, ...]


def take_inventory(store: Store, line: Line) -> Inventory:
    """Return what lies in a run, as a listing shows it, with the size of each object."""
    needs = {commit.attempt: _needs(store, commit) for commit in line.commits}
    keys = sorted(store.list(""))
    sizes = dict(zip(keys, each(lambda key: _size(store, key), keys), strict=True))
    kinds = _Kinds(line, keys, needs)
    by_kind: defaultdict[str, Counter[str]] = defaultdict(Counter)
    by_attempt: defaultdict[Attempt, Counter[str]] = defaultdict(Counter)
    for key, nbytes in sizes.items():
        kind = kinds.of(key)
        attempt = _attempt(key)
        for tally in (by_kind[kind], *([by_attempt[attempt]] if attempt is not None else [])):
            tally.update(objects=1, nbytes=nbytes)
    counts = {commit.attempt for commit in line.commits}
    apart = [
        Apart(
            attempt=attempt,
            kind=kinds.of_attempt(attempt),
            complete=kinds.of_attempt(attempt) == UNFINISHED and _is_complete(store, line, attempt, keys),
            amount=Amount(objects=tally["objects"], nbytes=tally["nbytes"]),
        )
        for attempt, tally in sorted(by_attempt.items())
        if attempt not in counts and not kinds.is_gone(attempt)
    ]
    return Inventory(
        amounts={kind: Amount(objects=by_kind[kind]["objects"], nbytes=by_kind[kind]["nbytes"]) for kind in KINDS},
        apart=tuple(apart),
        losses=tuple(_losses(line, needs)),
        unknown=tuple(key for key in keys if kinds.of(key) == UNKNOWN),
    )


class _Kinds:
    """Says of keys and attempts of what kind they are."""

    def __init__(self, line: Line, keys: Iterable[str], needs: Mapping[Attempt, frozenset[str] | None]) -> None:
        self._line = line
        self._counts = set(needs)
        self._needed = {key for found in needs.values() for key in found or ()}
        self._names: defaultdict[Attempt, set[str]] = defaultdict(set)
        for key in keys:
            attempt = _attempt(key)
            if attempt is not None:
                self._names[attempt].add(key)
        continued = [(link.generation, link.nonce, link.limit) for link in line.chain.links.values()]
        self._continued = {Attempt(step=limit, generation=g, nonce=n) for g, n, limit in continued if limit is not None}

    def of(self, key: str) -> str:
        attempt = _attempt(key)
        if attempt is None:
            ours = key == layout.RUN or key.startswith((layout.GENERATIONS, layout.CONTROL))
            ours = ours or layout.parse_journal(key) is not None
            return RUN if ours else UNKNOWN
        if attempt in self._counts:
            return COMMITTED
        if key in self._needed:
            return REFERENCED
        if key.startswith(attempt.tombstone):
            return RUN  # it stays for ever
        return self.of_attempt(attempt)

    def of_attempt(self, attempt: Attempt) -> str:
        if attempt in self._line.torn:
            return TORN
        given_up = attempt.tombstone in self._names[attempt]
        later = attempt.generation > self._line.chain.head
        current = attempt.generation == self._line.chain.head and self._line.chain.holds(attempt)
        return UNFINISHED if not given_up and (later or current or attempt in self._continued) else ORPHANED

    def is_gone(self, attempt: Attempt) -> bool:
        """Say whether nothing is left of an attempt but that it was given up."""
        return all(key.startswith(attempt.tombstone) for key in self._names[attempt])


def _is_complete(store: Store, line: Line, attempt: Attempt, keys: Iterable[str]) -> bool:
    """Say whether only the COMMIT of an attempt is missing, as far as a listing shows it."""
    if attempt in line.uncommitted:
        return True
    claim = read_claim(store, attempt.generation) if line.chain.holds(attempt) else None
    return claim is not None and sum(key.startswith(attempt.receipts) for key in keys) == claim.world_size


def _losses(line: Line, needs: Mapping[Attempt, frozenset[str] | None]) -> Iterable[Loss]:
    """Yield what it would mean to lose any of those attempts on which the newest checkpoints rest."""
    rests = {
        attempt: {attempt, *(base for key in found if (base := layout.parse_data(key)) is not None)}
        for attempt, found in needs.items()
        if found is not None  # else it is lost already
    }
    asked = [holder for commit in line.commits[:_NEWEST] for holder in rests.get(commit.attempt, ())]
    for holder in sorted(set(asked), reverse=True):
        takes = [commit.step for commit in line.commits if holder in rests.get(commit.attempt, ())]
        left = [
            commit.step
            for commit in line.commits
            if holder not in rests.get(commit.attempt, {holder}) and FAILED not in line.marks.get(commit.attempt, ())
        ]
        yield Loss(attempt=holder, takes=tuple(takes), left=left[0] if left else None)


def _needs(store: Store, commit: Commit) -> frozenset[str] | None:
    """Return the data objects of a checkpoint; None if it is being deleted, or its manifest is damaged."""
    try:
        return frozenset(one.key for one in open_manifest(store, commit).objects)
    except CorruptError:
        return None


def _attempt(key: str) -> Attempt | None:
    found = layout.parse_attempt(key)
    return found[0] if found is not None else layout.parse_data(key)


def _size(store: Store, key: str) -> int:
    try:
        return store.size(key)
    except NotFoundError:
        return 0  # gone since the listing
