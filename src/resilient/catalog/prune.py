"""Deleting what retention does not keep, without ever taking away what somebody needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from resilient.catalog.generations import newest_number, read_base, read_claim
from resilient.catalog.launch import remove_dead_launches
from resilient.catalog.line import Chain, Line, is_given_up, list_attempts, read_chain
from resilient.catalog.marks import FAILED, READING, RUN, held_back, is_failed, read_mark, remove_dead_readers
from resilient.catalog.once import exists
from resilient.catalog.parallel import each
from resilient.catalog.process import lives
from resilient.catalog.references import referrers
from resilient.catalog.shared import shared
from resilient.catalog.tombstones import bury
from resilient.clock import Clock
from resilient.errors import ConflictError, ErrorKind
from resilient.format import layout
from resilient.format.layout import Attempt
from resilient.policy.keep import Keep
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
    them stays until these go too. ``swept``: how many attempts' data is gone. ``signs``: how many signs of life of
    readers and launches that have died.
    """

    steps: tuple[int, ...]
    held: tuple[Held, ...]
    debris: int
    nbytes: int
    swept: int
    signs: int = 0


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


def retained(line: Line, keep: Keep) -> frozenset[int]:
    """Return the steps of the line that a policy keeps. Marks are as listed: what must never go, `prune` looks up."""
    failed = {commit.step for commit in line.commits if FAILED in line.marks.get(commit.attempt, ())}
    return keep.kept(line.commits, failed=failed)


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

    Never deletes the newest checkpoint of the line, nor the newest that is not marked failed, nor one that is pinned or
    being read, nor objects of a deleted one to which another refers that counts, or may come to count. Two passes: an
    attempt first gets its TOMBSTONE, which is permanent, so that no reader chooses it any more; its data goes in a
    later call, so that whoever had chosen it before, and may not write a reading mark, has time to finish. ``grace_s``
    does both in this call, that many seconds apart. Killed at any point, the next call goes on. TOMBSTONEs stay: a
    committer that wakes up late must find them.

    Debris is what can never count again: attempts, and data without any, of generations before the newest one on the
    line, unless they are on the line or some generation continues from them; and uncommitted ones of the newest
    generation once it has committed two later steps. Whatever that generation, or one after it that has no base yet,
    is writing is therefore never touched. Nothing is debris while documents of the line are damaged. Nothing is told
    by times: how old something is, later commits say.

    Claims and bases stay: a number that was free again could be claimed a second time, where a listing is stale.

    Args:
        store: the run.
        line: as read just before the decision what to keep.
        keep: steps.
        clock: to wait with, and for the time that people read in a TOMBSTONE.
        dry_run: only say what would be done.
        grace_s: how long readers have; None leaves the data to a later call.
        watch: whether to find out if readers and launches on other machines are still alive, which takes half a minute.

    Raises:
        ConflictError: kind ``taken-over``: a newer generation has started since the line was read; nothing was deleted.
    """
    found = _look(store)
    gone = {commit.attempt: commit.nbytes for commit in line.commits[1:] if commit.step not in keep}
    if gone and (good := _last_good(store, line)) is not None:
        gone.pop(good, None)
    damaged = [one for one in line.torn if line.commits and one.step < line.commits[0].step and one.step not in keep]
    victims = sorted({*gone, *damaged, *_debris(store, line, found)})
    newer = _newer(store, line) if victims else ()
    reasons = {
        attempt: why
        for attempt in victims
        if (why := held_back(store, attempt, clock, newer=newer, watch=watch)) is not None
    }
    condemned = [attempt for attempt in victims if attempt not in reasons]
    buried: list[Attempt] = []
    signs = 0
    if not dry_run:
        _check_newest(store, line)
        buried = _bury(store, line, found, condemned, clock, grace_s=grace_s, watch=watch)
        signs = _sweep_signs(store, line, clock, watch=watch)
    return Pruned(
        steps=tuple(attempt.step for attempt in condemned if attempt in gone),
        held=tuple(Held(step=attempt.step, why=why) for attempt, why in reasons.items() if attempt in gone),
        debris=sum(attempt not in gone for attempt in condemned),
        nbytes=sum(gone.get(attempt, 0) for attempt in condemned),
        swept=len(buried),
        signs=signs,
    )


def _last_good(store: Store, line: Line) -> Attempt | None:
    """Return the newest checkpoint that no mark calls failed, by the marks' exact names; None if there is none."""
    return next((commit.attempt for commit in line.commits if is_failed(store, commit.attempt) is None), None)


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
        if _TOMBSTONE in names.get(attempt, ()) and (data.get(attempt) or not all(map(_stays, names[attempt])))
    }
    marked = each(lambda attempt: list(referrers(store, attempt)), sorted(doomed))
    referring = {by for found in marked for by in found if by is not None}
    return _Found(names=names, data=data, doomed=doomed, referring=referring)


def _stays(name: str) -> bool:
    return name.startswith(_TOMBSTONE)


def _newer(store: Store, line: Line) -> range:
    """Return the generations that have begun since the newest one of this line, by the exact names of their claims."""
    return range(line.chain.head + 1, newest_number(store) + 1)


def _debris(store: Store, line: Line, found: _Found) -> list[Attempt]:
    if line.chain.broken:
        return []
    head = line.chain.head
    own = [commit.step for commit in line.commits if commit.generation == head]
    settled = own[_LATER - 1] if len(own) >= _LATER else 0
    # What a generation continues from may still be unfinished: its writer outlives the trainer and commits it.
    continued = {(link.generation, link.limit) for link in line.chain.links.values()}
    counted = {*(commit.attempt for commit in line.commits), *line.torn}
    candidates: list[Attempt] = []
    for attempt in sorted(found.attempts()):  # in order, so that a simulation can be repeated
        needed = attempt in counted or (attempt.generation, attempt.step) in continued
        if needed or found.is_given_up(attempt) or _may_return(store, line, attempt):
            continue
        # A save that failed must not take up space, nor hold what it referred to, for as long as its generation lives.
        if attempt.generation < head or (attempt.generation == head and attempt.step < settled):
            candidates.append(attempt)
    return _without_unlisted(store, line, candidates)


def _without_unlisted(store: Store, line: Line, candidates: list[Attempt]) -> list[Attempt]:
    """Return those that do not count; the listing from which the line was read may have missed that they do."""
    committed = {attempt for attempt in candidates if exists(store, attempt.commit)}
    if not committed:
        return candidates
    chain = read_chain(store, committed)  # as far back as these: it may have ended early for want of them
    steps = {commit.step for commit in line.commits}
    return [
        attempt
        for attempt in candidates
        if attempt not in committed
        or not (attempt.generation == line.chain.head or chain.broken or chain.holds(attempt))
        or (attempt.generation < line.chain.head and attempt.step in steps)  # a newer generation has saved this step
    ]


def _may_return(store: Store, line: Line, attempt: Attempt) -> bool:
    """Say whether the run has demoted this one and has come to nothing newer: it may yet find out that it was wrong."""
    ahead = not line.commits or attempt.step > line.commits[0].step
    return ahead and read_mark(store, attempt, FAILED, RUN) is not None


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
    store: Store,
    line: Line,
    found: _Found,
    condemned: list[Attempt],
    clock: Clock,
    *,
    grace_s: float | None,
    watch: bool,
) -> list[Attempt]:
    """Remove what is left of those that were given up long enough ago, and give up the condemned; return the removed.

    In that order: on a full disk there is no room for a TOMBSTONE before something is removed.
    """
    buried = _sweep(store, line, found, found.doomed, clock, watch=watch)
    for attempt in condemned:
        give_up(store, attempt, clock, reason="retention", chain=line.chain)
    if grace_s is not None and condemned:
        clock.sleep(grace_s)
        buried += _sweep(store, line, found, condemned, clock, watch=watch)
    return buried


def _sweep_signs(store: Store, line: Line, clock: Clock, *, watch: bool) -> int:
    """Remove signs of life of the dead: nobody would ever do, beside a checkpoint that stays."""
    read = [commit.attempt for commit in line.commits if READING in line.marks.get(commit.attempt, ())]
    readers = sum(each(lambda attempt: remove_dead_readers(store, attempt, clock, watch=watch), read))
    return readers + (remove_dead_launches(store, clock) if watch else 0)


def give_up(store: Store, attempt: Attempt, clock: Clock, *, reason: str, chain: Chain | None = None) -> None:
    """Write the TOMBSTONE of an attempt: from now on it does not count, whoever commits it; its data is garbage.

    ``chain``: the line on which it is not needed any more, as far as it was known when that was decided. A generation
    that has gone back to this attempt meanwhile does not lose it. None for what can never be whole: that holds for all.
    """
    head, continued_by = (None, None) if chain is None else (chain.head, chain.continued_by(attempt))
    bury(store, attempt, clock, reason=reason, head=head, continued_by=continued_by)


def _sweep(
    store: Store, line: Line, found: _Found, ready: Collection[Attempt], clock: Clock, *, watch: bool
) -> list[Attempt]:
    """Remove what attempts with a TOMBSTONE have stored, unless somebody needs it; return those gone."""
    buried: list[Attempt] = []
    newer = _newer(store, line) if ready else ()  # after the last TOMBSTONE: see `tombstones`
    # The newest first: what an attempt refers to is free once it is gone itself.
    for attempt in sorted(ready, reverse=True):
        # The marks again, after the tombstone: a reader, and whoever refers, writes its mark first and looks for the
        # tombstone then. And whether it counts all the same: the TOMBSTONE may be void.
        held = held_back(store, attempt, clock, newer=newer, watch=watch)
        needed = shared(store, attempt) if held is None and is_given_up(store, attempt, line.chain) else None
        if needed is None:
            continue
        each(store.delete, sorted(found.data.get(attempt, set()) - needed))
        names = found.names.get(attempt, ())
        for kind in _ORDER[:-1] if needed else _ORDER:
            each(store.delete, [attempt.prefix + name for name in sorted(names) if name.startswith(kind)])
        if not needed:
            buried.append(attempt)
    return buried
