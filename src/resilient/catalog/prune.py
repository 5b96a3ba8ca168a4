"""Deleting what retention does not keep, without ever taking away what somebody needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from resilient.catalog.generations import newest_number, read_base, read_claim
from resilient.catalog.line import Line, list_attempts
from resilient.catalog.marks import held_back
from resilient.catalog.once import create_once
from resilient.catalog.parallel import each
from resilient.catalog.process import lives
from resilient.clock import Clock, rfc3339
from resilient.errors import ConflictError, ErrorKind
from resilient.format import layout
from resilient.format.documents import Tombstone, encode_document
from resilient.format.layout import Attempt
from resilient.store.base import Store

_TOMBSTONE = "TOMBSTONE"
_ORDER = ("receipts/", "manifest-", "COMMIT", "marks/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A checkpoint that would have been deleted."""

    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What was deleted, or would be.

    ``steps``: checkpoints that count no more. ``held``: those that stay because of a mark. ``debris``: how many
    attempts that could never count again were given up. ``nbytes``: of the data of ``steps``. ``swept``: how many
    attempts' data is gone.
    """

    steps: tuple[int, ...]
    held: tuple[Held, ...]
    debris: int
    nbytes: int
    swept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What listings show: the names below each attempt, and the keys of each attempt's data."""

    names: Mapping[Attempt, AbstractSet[str]]
    data: Mapping[Attempt, AbstractSet[str]]

    def attempts(self) -> set[Attempt]:
        return {*self.names, *self.data}

    def is_given_up(self, attempt: Attempt) -> bool:
        return _TOMBSTONE in self.names.get(attempt, ())

    def has_remains(self, attempt: Attempt) -> bool:
        return bool(self.data.get(attempt) or set(self.names.get(attempt, ())) - {_TOMBSTONE})


def prune(
    store: Store,
    line: Line,
    keep: AbstractSet[int],
    *,
    clock: Clock,
    dry_run: bool = False,
    grace_s: float | None = None,
    watch: bool = False,
) -> Pruned:
    """Delete the checkpoints of the line whose steps are not in ``keep``, and debris.

    Never deletes the newest checkpoint of the line, nor one that is pinned or being read. Two passes: an attempt
    first gets its TOMBSTONE, which is permanent, so that no reader chooses it any more; its data goes in a later
    call, so that whoever had chosen it before, and may not write a reading mark, has time to finish. ``grace_s`` does
    both in this call, that many seconds apart. Killed at any point, the next call goes on. TOMBSTONEs stay: a
    committer that wakes up late must find them.

    Debris is what can never count again: attempts, and data without any, of generations before the newest one on the
    line, unless they are on the line or some generation continues from them. Whatever the newest generation, or one
    after it that has no base yet, is writing is therefore never touched. Nothing is debris while documents of the
    line are damaged.

    Args:
        store: the run.
        line: as read just before the decision what to keep.
        keep: steps.
        clock: to wait with, and for the time that people read in a TOMBSTONE.
        dry_run: only say what would be done.
        grace_s: how long readers have; None leaves the data to a later call.
        watch: whether to find out if readers on other machines are still alive, which takes half a minute.

    Raises:
        ConflictError: kind ``taken-over``: a newer generation has started since the line was read; nothing was deleted.
    """
    found = _look(store)
    gone = {commit.attempt: commit.nbytes for commit in line.commits[1:] if commit.step not in keep}
    damaged = [one for one in line.torn if line.commits and one.step < line.commits[0].step and one.step not in keep]
    victims = sorted({*gone, *damaged, *_debris(line, found)})
    reasons = {
        attempt: why for attempt in victims if (why := held_back(store, attempt, clock, watch=watch)) is not None
    }
    condemned = [attempt for attempt in victims if attempt not in reasons]
    buried: list[Attempt] = []
    if not dry_run:
        _check_newest(store, line)
        buried = _bury(store, found, condemned, clock, grace_s=grace_s, watch=watch)
    return Pruned(
        steps=tuple(attempt.step for attempt in condemned if attempt in gone),
        held=tuple(Held(step=attempt.step, why=why) for attempt, why in reasons.items() if attempt in gone),
        debris=sum(attempt not in gone for attempt in condemned),
        nbytes=sum(gone.get(attempt, 0) for attempt in condemned),
        swept=len(buried),
    )


def _look(store: Store) -> _Found:
    data: defaultdict[Attempt, set[str]] = defaultdict(set)
    for key in store.list(layout.DATA):
        attempt = layout.parse_data(key)
        if attempt is not None:
            data[attempt].add(key)
    return _Found(names=list_attempts(store), data=data)


def _debris(line: Line, found: _Found) -> Iterable[Attempt]:
    if line.chain.broken:
        return
    # What a generation continues from may still be unfinished: its writer outlives the trainer and commits it.
    continued = {(link.generation, link.limit) for link in line.chain.links.values()}
    counted = {*(commit.attempt for commit in line.commits), *line.torn}
    for attempt in found.attempts():
        needed = attempt in counted or (attempt.generation, attempt.step) in continued
        if attempt.generation < line.chain.head and not needed and not found.is_given_up(attempt):
            yield attempt


def _check_newest(store: Store, line: Line) -> None:
    """Refuse to delete by an outdated line: what it leaves out may be what a newer generation continues from.

    A newer one without a base may have chosen already, and write that base next, as long as its process lives.
    """
    for generation in range(newest_number(store), line.chain.head, -1):
        claim = read_claim(store, generation)
        starting = claim is not None and lives(claim.host, claim.pid, claim.process_started) is not False
        if starting or read_base(store, generation) is not None:
            raise ConflictError(
                f"{store.url}: generation {generation} has started since generation {line.chain.head} was the newest, "
                "so what may be deleted is not known any more",
                kind=ErrorKind.TAKEN_OVER,
                hint="try again once that one has restored, or has ended",
            )


def _bury(
    store: Store, found: _Found, condemned: list[Attempt], clock: Clock, *, grace_s: float | None, watch: bool
) -> list[Attempt]:
    """Remove what is left of those that were given up long enough ago, and give up the condemned; return the removed.

    In that order: on a full disk there is no room for a TOMBSTONE before something is removed.
    """
    ready = [attempt for attempt in found.attempts() if found.is_given_up(attempt) and found.has_remains(attempt)]
    buried = _sweep(store, found, ready, clock, watch=watch)
    for attempt in condemned:
        give_up(store, attempt, clock, reason="retention")
    if grace_s is not None and condemned:
        clock.sleep(grace_s)
        buried += _sweep(store, found, condemned, clock, watch=watch)
    return buried


def give_up(store: Store, attempt: Attempt, clock: Clock, *, reason: str) -> None:
    """Write the TOMBSTONE of an attempt: from now on it does not count, whoever commits it; its data is garbage."""
    document = Tombstone(
        step=attempt.step,
        generation=attempt.generation,
        nonce=attempt.nonce,
        created=rfc3339(clock.now()),
        reason=reason,
    )
    create_once(store, attempt.tombstone, encode_document(document))


def _sweep(store: Store, found: _Found, ready: Iterable[Attempt], clock: Clock, *, watch: bool) -> list[Attempt]:
    """Remove what attempts with a TOMBSTONE have stored, unless somebody reads them."""
    # The marks again, after the tombstone: a reader writes its mark first and looks for the tombstone then.
    buried = [attempt for attempt in sorted(ready) if held_back(store, attempt, clock, watch=watch) is None]
    for attempt in buried:
        each(store.delete, sorted(found.data.get(attempt, ())))
        names = found.names.get(attempt, ())
        for kind in _ORDER:
            each(store.delete, [attempt.prefix + name for name in sorted(names) if name.startswith(kind)])
    return buried
