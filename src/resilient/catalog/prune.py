"""Deleting what retention does not keep, without ever taking away what somebody needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from resilient.catalog.generations import newest_number, read_base, read_claim
from resilient.catalog.line import Line, list_attempts
from resilient.catalog.marks import held_back
from resilient.catalog.once import create_once, exists
from resilient.catalog.parallel import each
from resilient.catalog.process import lives
from resilient.catalog.references import referrers
from resilient.catalog.shared import shared
from resilient.clock import Clock, rfc3339
from resilient.errors import ConflictError, ErrorKind
from resilient.format import layout
from resilient.format.documents import Tombstone, encode_document
from resilient.format.layout import Attempt
from resilient.store.base import Store

_TOMBSTONE = "TOMBSTONE"
_ORDER = ("receipts/", "manifest-", "COMMIT", "marks/")
_LATER = 2
"""Ranks write one save after another: when so many later ones are committed, this one has no writer any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A checkpoint that would have been deleted."""

    step: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What was deleted, or would be.

    ``steps``: checkpoints that count no more. ``held``: those that stay because of a mark. ``debris``: how many
    attempts that could never count again were given up. ``nbytes``: of ``steps``; what other checkpoints share with
    them stays until these go too. ``swept``: how many attempts' data is gone.
    """

    steps: tuple[int, ...]
    held: tuple[Held, ...]
    debris: int
    nbytes: int
    swept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What listings show: the names below each attempt, and the keys of each attempt's data.

    ``doomed``: those with a TOMBSTONE and more. ``referring``: those that asked to share the data of one of these; they
    may have stored nothing themselves.
    """

    names: Mapping[Attempt, AbstractSet[str]]
    data: Mapping[Attempt, AbstractSet[str]]
    doomed: AbstractSet[Attempt]
    referring: AbstractSet[Attempt]

    def attempts(self) -> set[Attempt]:
        return {*self.names, *self.data, *self.referring}

    def is_given_up(self, attempt: Attempt) -> bool:
        return _TOMBSTONE in self.names.get(attempt, ())


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

    Never deletes the newest checkpoint of the line, nor one that is pinned or being read, nor objects of a deleted one
    to which another refers that counts, or may come to count. Two passes: an attempt first gets its TOMBSTONE, which is
    permanent, so that no reader chooses it any more; its data goes in a later call, so that whoever had chosen it
    before, and may not write a reading mark, has time to finish. ``grace_s`` does both in this call, that many seconds
    apart. Killed at any point, the next call goes on. TOMBSTONEs stay: a committer that wakes up late must find them.

    Debris is what can never count again: attempts, and data without any, of generations before the newest one on the
    line, unless they are on the line or some generation continues from them. Whatever the newest generation, or one
    after it that has no base yet, is writing is therefore never touched, unless it refers to what is deleted, and two
    later saves have been committed. Nothing is debris while documents of the line are damaged.

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
    victims = sorted({*gone, *damaged, *_debris(store, line, found)})
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
    names = list_attempts(store)
    doomed = {
        attempt
        for attempt in {*names, *data}
        if _TOMBSTONE in names.get(attempt, ()) and (data.get(attempt) or names[attempt] != {_TOMBSTONE})
    }
    marked = each(lambda attempt: list(referrers(store, attempt)), sorted(doomed))
    referring = {by for found in marked for by in found if by is not None}
    return _Found(names=names, data=data, doomed=doomed, referring=referring)


def _debris(store: Store, line: Line, found: _Found) -> Iterable[Attempt]:
    if line.chain.broken:
        return
    head = line.chain.head
    own = [commit.step for commit in line.commits if commit.generation == head]
    settled = own[_LATER - 1] if len(own) >= _LATER else 0
    # What a generation continues from may still be unfinished: its writer outlives the trainer and commits it.
    continued = {(link.generation, link.limit) for link in line.chain.links.values()}
    counted = {*(commit.attempt for commit in line.commits), *line.torn}
    for attempt in found.attempts():
        needed = attempt in counted or (attempt.generation, attempt.step) in continued
        if needed or found.is_given_up(attempt):
            continue
        # A save that failed must not hold what it referred to for as long as its generation lives.
        failed = attempt in found.referring and attempt.generation == head and attempt.step < settled
        if attempt.generation < head or (failed and not exists(store, attempt.commit)):
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
    buried = _sweep(store, found, found.doomed, clock, watch=watch)
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
    """Remove what attempts with a TOMBSTONE have stored, unless somebody reads or refers to it; return those gone."""
    buried: list[Attempt] = []
    # The newest first: what an attempt refers to is free once it is gone itself.
    for attempt in sorted(ready, reverse=True):
        # The marks again, after the tombstone: a reader, and whoever refers, writes its mark first and looks for the
        # tombstone then.
        needed = shared(store, attempt) if held_back(store, attempt, clock, watch=watch) is None else None
        if needed is None:
            continue
        each(store.delete, sorted(found.data.get(attempt, set()) - needed))
        names = found.names.get(attempt, ())
        for kind in _ORDER[:-1] if needed else _ORDER:
            each(store.delete, [attempt.prefix + name for name in sorted(names) if name.startswith(kind)])
        if not needed:
            buried.append(attempt)
    return buried
