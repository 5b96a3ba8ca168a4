"""Which commits of a run count: those on the line that the newest generation continues."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from resilient.catalog.generations import newest_number, read_base, read_claim
from resilient.catalog.hints import proposed
from resilient.catalog.once import exists, read_document
from resilient.catalog.parallel import each
from resilient.catalog.tombstones import CONTINUED, is_buried
from resilient.errors import CorruptError, ErrorKind, NotFoundError
from resilient.format import layout
from resilient.format.documents import Base, Commit
from resilient.format.layout import Attempt
from resilient.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One generation of the line: commits up to ``limit`` count, where its successor branched off (None: all do).

    ``continued_by`` is that successor; None for the newest one.
    """

    generation: int
    nonce: str
    limit: int | None
    continued_by: int | None = None

    @property
    def branch(self) -> Attempt | None:
        """The attempt that its successor continues from."""
        return None if self.limit is None else Attempt(step=self.limit, generation=self.generation, nonce=self.nonce)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The generations of the line by number, newest first; ``broken`` says which damage ends it early."""

    links: Mapping[int, Link]
    broken: str | None = None

    @property
    def head(self) -> int:
        """The newest generation that counts; 0 if there is none."""
        return next(iter(self.links), 0)

    def holds(self, attempt: Attempt) -> bool:
        """Say whether a commit of this attempt would count."""
        link = self.links.get(attempt.generation)
        return link is not None and link.nonce == attempt.nonce and (link.limit is None or attempt.step <= link.limit)

    def continued_by(self, attempt: Attempt) -> int | None:
        """Return the generation of the line that continues from this very attempt; None if none does."""
        link = self.links.get(attempt.generation)
        return link.continued_by if link is not None and link.branch == attempt else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What counts of a run.

    ``commits``: newest first. ``ignored``: sentences about damaged documents that may hide commits. ``chain``: the
    generations that count. ``torn``: attempts on the line whose COMMIT is there and does not parse. ``uncommitted``:
    attempts that have a manifest and no COMMIT: its writer died in between, or it was lost. ``marks``: of the
    commits, as listed.
    """

    commits: tuple[Commit, ...]
    ignored: tuple[str, ...]
    chain: Chain
    torn: tuple[Attempt, ...] = ()
    uncommitted: tuple[Attempt, ...] = ()
    marks: Mapping[Attempt, tuple[str, ...]] = field(default_factory=dict)

    def at(self, step: int) -> Commit:
        """Return the commit of this step.

        Raises:
            NotFoundError: the line has none; the hint lists the steps that it has.
            CorruptError: it has one whose COMMIT is damaged.
        """
        for commit in self.commits:
            if commit.step == step:
                return commit
        for attempt in self.torn:
            if attempt.step == step:
                raise CorruptError(
                    f"{attempt.commit} does not parse: {attempt} cannot be used", kind=ErrorKind.MALFORMED
                )
        if not self.commits:
            raise NotFoundError(
                f"there is no checkpoint of step {step}, nor of any other", kind=ErrorKind.NO_CHECKPOINT
            )
        raise NotFoundError(
            f"there is no checkpoint of step {step}",
            kind=ErrorKind.NO_SUCH_STEP,
            hint=f"there are steps {self._steps(step)}",
        )

    def _steps(self, near: int, most: int = 10) -> str:
        steps = sorted({commit.step for commit in self.commits}, key=lambda one: abs(one - near))[:most]
        return ", ".join(map(str, sorted(steps))) + (", ..." if len(self.commits) > most else "")


def read_line(store: Store) -> Line:
    """Return what counts of a run, as a reader finds it now.

    Starts at the newest generation with a base and walks back through the bases. A commit counts if its COMMIT parses
    and belongs where it lies, its generation is on that chain with that nonce, its step is not beyond the point where
    the successor branched off, and there is no TOMBSTONE, but for one that was decided before the successor of a branch
    point was there. So nothing that an earlier generation still writes can change what is chosen. Listings only propose
    which attempts to look at, and may be stale: so do the bases, and the hint of the newest generation; each attempt is
    then read by its exact name.
    """
    gone: set[Attempt] = set()
    while True:
        line, vanished = _read(store)
        # A reader that stalled in between may find all that it looks for deleted, and newer ones saved meanwhile.
        if vanished <= gone:
            return line
        gone |= vanished


def _read(store: Store) -> tuple[Line, set[Attempt]]:
    """Return what counts, and what was given up since the listing was made, so that newer commits may be missing."""
    listed = list_attempts(store)
    committed = [attempt for attempt, names in listed.items() if "COMMIT" in names]
    chain = read_chain(store, committed)
    candidates = list(dict.fromkeys([*(one for one in committed if chain.holds(one)), *_unlisted(store, chain)]))
    looked = each(lambda attempt: _look(store, attempt, chain), candidates)
    position = {generation: index for index, generation in enumerate(chain.links)}
    found = [one for one in looked if isinstance(one, Commit)]
    found.sort(key=lambda commit: (position[commit.generation], -commit.step))
    torn = tuple(one for one in looked if isinstance(one, Attempt))
    commits: dict[int, Commit] = {}
    for commit in found:
        commits.setdefault(commit.step, commit)  # the newest generation that saved a step
    ignored = [f"{attempt.commit} does not parse, so {attempt} does not count" for attempt in torn]
    if not commits and len(chain.links) > 1:
        _, before = list(chain.links.values())[:2]
        ignored.append(f"generation {chain.head} continues step {before.limit}, and no checkpoint of the line is left")
    line = Line(
        commits=tuple(commits.values()),
        ignored=(*([chain.broken] if chain.broken else []), *ignored),
        chain=chain,
        torn=torn,
        uncommitted=tuple(sorted(one for one, names in listed.items() if chain.holds(one) and _is_unfinished(names))),
        marks={commit.attempt: _marks(listed.get(commit.attempt, ())) for commit in commits.values()},
    )
    missed = [
        attempt
        for attempt, one in zip(candidates, looked, strict=True)
        if one is None and "TOMBSTONE" not in listed.get(attempt, ())
    ]
    buried = each(lambda attempt: exists(store, attempt.tombstone), missed)
    return line, {attempt for attempt, given_up in zip(missed, buried, strict=True) if given_up}


def is_given_up(store: Store, attempt: Attempt, chain: Chain | None = None) -> bool:
    """Say whether an attempt has a TOMBSTONE that counts on the line; ``chain`` if that has just been read."""
    if not exists(store, attempt.tombstone):
        return False
    chain = chain or read_chain(store, [attempt])
    return is_buried(store, attempt, chain.continued_by(attempt))


def _unlisted(store: Store, chain: Chain) -> list[Attempt]:
    """Return what a listing may not show yet, and must not be missed: the newest commits, and what was continued."""
    newest = chain.links.get(chain.head)
    hinted = [] if newest is None else proposed(store, newest.generation, newest.nonce)
    return [*hinted, *(branch for link in chain.links.values() if (branch := link.branch) is not None)]


def list_attempts(store: Store) -> dict[Attempt, set[str]]:
    """Return all attempts that a listing shows, with the names of what each holds."""
    attempts: defaultdict[Attempt, set[str]] = defaultdict(set)
    for key in store.list(layout.STEPS):
        parsed = layout.parse_attempt(key)
        if parsed is not None:
            attempts[parsed[0]].add(parsed[1])
    return attempts


def _is_unfinished(names: set[str]) -> bool:
    return not names & {"COMMIT", "TOMBSTONE"} and any(name.startswith("manifest-") for name in names)


def read_chain(store: Store, committed: Iterable[Attempt]) -> Chain:
    """Walk from the newest generation that has a base, or commits, back as far as there are commits.

    Costs a listing of the generations and a few small reads for each of those on the way, however many commits there
    are.
    """
    nonces: defaultdict[int, set[str]] = defaultdict(set)
    for attempt in committed:
        nonces[attempt.generation].add(attempt.nonce)
    lost: str | None = None
    for generation in range(max(newest_number(store), *nonces, 0), 0, -1):
        base = read_base(store, generation)
        if base is not None:
            return _walk(store, base, oldest=min(nonces, default=generation), lost=lost)
        if generation not in nonces:
            continue
        # A base is durable before the first save of its generation: this one was there and is damaged or lost. Its
        # commits count all the same; falling back to the generation before would throw them away for a flipped bit.
        claim = read_claim(store, generation)
        if claim is not None and claim.nonce in nonces[generation]:
            link = Link(generation=generation, nonce=claim.nonce, limit=None)
            return Chain(links={generation: link}, broken=_broken(generation))
        if claim is None:
            lost = f"{layout.base(generation)} and {layout.claim(generation)} are damaged: their commits do not count"
    return Chain(links={}, broken=lost)


def _walk(store: Store, base: Base, *, oldest: int, lost: str | None) -> Chain:
    links = {base.generation: Link(generation=base.generation, nonce=base.nonce, limit=None)}
    while (before := base.attempt) is not None:
        if before.generation >= base.generation:
            return Chain(links=links, broken=f"{layout.base(base.generation)} continues a later generation")
        links[before.generation] = Link(
            generation=before.generation, nonce=before.nonce, limit=before.step, continued_by=base.generation
        )
        if before.generation <= oldest:
            break
        further = read_base(store, before.generation)
        if further is None or further.nonce != before.nonce:
            return Chain(links=links, broken=_broken(before.generation))
        base = further
    return Chain(links=links, broken=lost)


def _broken(generation: int) -> str:
    return (
        f"{layout.base(generation)} is lost or damaged, so what was saved before generation {generation} does not count"
    )


def _look(store: Store, attempt: Attempt, chain: Chain) -> Commit | Attempt | None:
    """Return the commit of an attempt, the attempt itself if its COMMIT is damaged, or None if it does not count."""
    try:
        commit = read_document(store, Commit, attempt.commit)
    except CorruptError as error:
        if error.kind is ErrorKind.NEWER_FORMAT:
            raise
        commit = None
        damaged = True
    else:
        damaged = commit is not None and commit.attempt != attempt
    if not damaged and commit is None:
        return None
    if is_buried(store, attempt, chain.continued_by(attempt)):
        return None
    return attempt if damaged else commit


def _marks(names: Iterable[str]) -> tuple[str, ...]:
    """Return the kinds of marks among the names of an attempt's objects: ``pinned``, ``verified``, ..."""
    kinds = {name.removeprefix("marks/").partition("-")[0] for name in names if name.startswith("marks/")}
    return tuple(sorted(kinds - {CONTINUED}))  # which says nothing that the line does not
