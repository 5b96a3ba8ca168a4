"""Somebody who sees every change of the store at the moment it lands, and says when one must not have been.

Nothing here calls what it judges: it knows the rules of the format, and what each rank has held.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from typing import Final, NamedTuple, Protocol, TypeVar

from resilient.errors import ErrorKind
from resilient.format import layout
from resilient.format.digest import digest
from resilient.format.documents import Base, Claim, Commit, Manifest, Tombstone, decode_document
from resilient.format.layout import Attempt
from resilient.format.manifests import decode_manifest
from resilient.testing.simulation.scheduling import Process
from resilient.testing.simulation.state import Part, Sick

D = TypeVar("D")

_GENERATION: Final = slice(len("data/00/g"), len("data/00/g00000000"))
"""Where a key of a data object says it."""


class Halt(BaseException):
    """Ends a simulation: something must not have been. Not an error that anything in it could handle."""


class Link(NamedTuple):
    """Up to which step a generation counts, and which one continues from that step; None for the newest."""

    limit: int | None
    continued_by: int | None


class _Objects(Protocol):
    @property
    def objects(self) -> dict[str, bytes]: ...


class Witness:
    """Follows a run by its rules, independently of the code that reads it.

    Args:
        keep_last: how many of the newest checkpoints retention leaves.
    """

    def __init__(self, *, keep_last: int) -> None:
        self.disk: _Objects | None = None
        self.now_s = 0.0
        self.commits: dict[Attempt, Commit] = {}
        self.ever_committed: set[Attempt] = set()
        self.claims: dict[int, Claim] = {}
        self.bases: dict[int, Base] = {}
        self.parts: defaultdict[Attempt, dict[int, Part]] = defaultdict(dict)
        self.sick: dict[Attempt, Sick] = {}
        self.given_up: set[Attempt] = set()
        self.readers: defaultdict[Attempt, list[Process]] = defaultdict(list)
        self.pinned: set[Attempt] = set()
        self._keep_last: Final = keep_last
        self._referring: defaultdict[str, set[Attempt]] = defaultdict(set)
        self._needed: dict[Attempt, list[str]] = {}
        self._heads: dict[Attempt, int | None] = {}
        self._retired: set[tuple[Attempt, int]] = set()
        self._newest: list[tuple[float, Attempt | None]] = [(0.0, None)]

    # What the line is -------------------------------------------------------------------------------------------------

    @property
    def head(self) -> int:
        """The newest generation that has a base; 0 if there is none."""
        return max(self.bases, default=0)

    def links(self) -> dict[int, Link]:
        """Return the generations on the line, newest first."""
        found: dict[int, Link] = {}
        base = self.bases.get(self.head)
        link = Link(None, None)
        while base is not None:
            found[base.generation] = link
            before = base.attempt
            if before is None:
                break
            link = Link(before.step, base.generation)
            base = self.bases.get(before.generation)
        return found

    def counted(self) -> dict[int, Attempt]:
        """Return what counts, by step, newest first."""
        links = self.links()
        found = [
            attempt
            for attempt in self.commits
            if (link := links.get(attempt.generation)) is not None
            and (link.limit is None or attempt.step <= link.limit)
            and not self._is_given_up(attempt, link)
        ]
        found.sort(key=lambda one: (-one.step, -one.generation))
        by_step: dict[int, Attempt] = {}
        for attempt in found:
            by_step.setdefault(attempt.step, attempt)
        return by_step

    def _is_given_up(self, attempt: Attempt, link: Link) -> bool:
        if attempt not in self.given_up:
            return False
        branched = link.continued_by
        if branched is None or attempt.step != link.limit:
            return True
        # What a generation goes back to is not taken away by who knew nothing of it.
        head = self._heads[attempt]
        return head is None or head >= branched or (attempt, branched) in self._retired

    def newest(self) -> Attempt | None:
        """Return what the next life continues from."""
        return next(iter(self.counted().values()), None)

    # What lands -------------------------------------------------------------------------------------------------------

    def created(self, key: str, data: bytes, process: Process) -> None:
        self.now_s = process.scheduler.now_s
        if key.startswith(layout.GENERATIONS):
            self._new_generation(key, data)
        elif key.startswith(layout.STEPS):
            parsed = layout.parse_attempt(key)
            assert parsed is not None, key
            attempt, name = parsed
            if name == "COMMIT":
                self._committed(attempt, data)
            elif name.startswith("TOMBSTONE"):
                self._given_up(attempt, name, data)
        elif key.startswith(layout.DATA):
            generation = int(key[_GENERATION])
            if generation not in self.bases:
                self.fail(f"{key} is stored before generation {generation} has said where it continues")

    def deleted(self, key: str, process: Process) -> None:
        self.now_s = process.scheduler.now_s
        generation = _based(key)
        if generation is not None:
            del self.bases[generation]
            self._note_newest()
            return
        attempt = layout.parse_data(key) or (layout.parse_attempt(key) or (None, ""))[0]
        if attempt is None or "/marks/" in key:
            return
        if "/TOMBSTONE" in key:
            self.fail(f"{key} is deleted, though a committer may wake up late")
        self._check_free(key, attempt)
        if key == attempt.commit:
            del self.commits[attempt]

    def _new_generation(self, key: str, data: bytes) -> None:
        number = layout.parse_claim(key)
        if number is not None:
            if number in self.claims:
                self.fail(f"{key} is claimed twice")
            self.claims[number] = _decoded(Claim, data, key)
            return
        number = _based(key)
        if number is None:
            return
        base = _decoded(Base, data, key)
        claim = self.claims.get(number)
        if claim is None or claim.nonce != base.nonce:
            self.fail(f"{key} is not of whoever claimed generation {number}")
        before = base.attempt
        if before is not None:
            commit = self.commits.get(before)
            if before.generation >= number or commit is None or commit.manifest != base.manifest:
                self.fail(f"{key} continues from {before}, which is no checkpoint of an earlier generation")
            self._check_complete(before)
        self.bases[number] = base
        self._note_newest()

    def _committed(self, attempt: Attempt, data: bytes) -> None:
        commit = _decoded(Commit, data, attempt.commit)
        if commit.attempt != attempt:
            self.fail(f"{attempt.commit} is that of {commit.attempt}")
        if attempt not in self.given_up:
            # Of one that was given up and swept since, a COMMIT may come late: it never counts.
            if attempt in self.ever_committed:
                self.fail(f"{attempt} is committed twice")
            self._check_whole(attempt, commit)
        self.commits[attempt] = commit
        self.ever_committed.add(attempt)
        self._note_newest()

    def _given_up(self, attempt: Attempt, name: str, data: bytes) -> None:
        before = self.counted()
        branched = name.removeprefix("TOMBSTONE").removeprefix("-")
        if branched:
            self._retired.add((attempt, int(branched)))
        elif attempt in self.given_up:
            self.fail(f"{attempt.tombstone} is replaced")
        else:
            self._heads[attempt] = _decoded(Tombstone, data, attempt.tombstone).head
            self.given_up.add(attempt)
        if before.get(attempt.step) == attempt != self.counted().get(attempt.step):
            newer = sum(step > attempt.step for step in before)
            if newer < self._keep_last:
                self.fail(f"{attempt} is given up, and only {newer} newer checkpoints count")
        self._note_newest()

    def _note_newest(self) -> None:
        newest = self.newest()
        if newest != self._newest[-1][1]:
            self._newest.append((self.now_s, newest))

    # What must not be -------------------------------------------------------------------------------------------------

    def fail(self, why: str) -> None:
        """End the simulation with this verdict."""
        raise Halt(why)

    def _check_whole(self, attempt: Attempt, commit: Commit) -> None:
        """Fail unless every byte of a committed state is durable, and it is one state of one world."""
        assert self.disk is not None
        objects, claim = self.disk.objects, self.claims.get(attempt.generation)
        if claim is None or claim.nonce != attempt.nonce or claim.world_size != commit.world_size:
            self.fail(f"{attempt} is committed for {commit.world_size} ranks by {claim}")
        if attempt in self.sick:
            self.fail(f"{attempt} is committed, with {self.sick[attempt]}")
        manifest = self._manifest(attempt, commit)
        ranks = range(commit.world_size)
        parts = self.parts[attempt]
        wrong = [rank for rank in ranks if rank not in parts or not _durable(attempt, parts[rank], objects)]
        if wrong:
            self.fail(f"{attempt} is committed, and what ranks {wrong[:8]} hold of it is not durable")
        written = [digest(objects[attempt.receipt(rank)]) for rank in ranks]
        if [each.digest for each in manifest.receipts] != written:
            self.fail(f"the manifest of {attempt} was not made of its receipts")
        self._check_covers(attempt, manifest)
        for each in manifest.objects:
            if each.key not in objects:
                self.fail(f"{attempt} is committed without {each.key}")
            self._referring[each.key].add(attempt)
        self._needed[attempt] = [each.key for each in manifest.objects]

    def _manifest(self, attempt: Attempt, commit: Commit) -> Manifest:
        assert self.disk is not None
        key = attempt.manifest(commit.manifest)
        content = self.disk.objects.get(key)
        if content is None or digest(content[-(commit.index_nbytes or len(content)) :]).hex() != commit.manifest:
            self.fail(f"{attempt} is committed, and {key} is not what COMMIT says")
            raise AssertionError
        return decode_manifest(content, commit.index_nbytes, key)

    def _check_covers(self, attempt: Attempt, manifest: Manifest) -> None:
        chunks = manifest.chunks
        held = frozenset().union(*(part.digests for part in self.parts[attempt].values()))
        if {row.tobytes() for row in chunks.places.digest} != held:
            self.fail(f"the manifest of {attempt} does not hold what its ranks hold")
        elements = sorted(zip(chunks.boxes.tensor.tolist(), chunks.boxes.offset[:, 0].tolist(), strict=True))
        wanted = [(number, row) for number, each in enumerate(manifest.tensors) for row in range(each.shape[0])]
        if elements != wanted:
            self.fail(f"the manifest of {attempt} does not cover every element once")

    def _check_free(self, key: str, attempt: Attempt) -> None:
        if self.counted().get(attempt.step) == attempt:
            self.fail(f"{key} is deleted, and {attempt} counts")
        if any(not reader.dead for reader in self.readers[attempt]):
            self.fail(f"{key} is deleted, and {attempt} is being read")
        if attempt in self.pinned:
            self.fail(f"{key} is deleted, and {attempt} is pinned")
        needing = self._referring[key]
        if any(by != attempt and self.counted().get(by.step) == by for by in needing):
            self.fail(f"{key} is deleted, and {needing - {attempt}} refer to it")

    def check_there(self) -> None:
        """Fail unless every object that something needs that counts is there."""
        for attempt in self.counted().values():
            self._check_complete(attempt)

    def _check_complete(self, attempt: Attempt) -> None:
        assert self.disk is not None
        gone = [key for key in self._needed[attempt] if key not in self.disk.objects]
        if gone:
            self.fail(f"{gone[0]} is gone, and {attempt} needs it")

    # What processes say -----------------------------------------------------------------------------------------------

    def chose(self, who: str, chosen: Attempt | None, *, since_s: float) -> None:
        """Fail unless what somebody took for the newest was that at some moment since."""
        first = bisect_right(self._newest, since_s, key=lambda each: each[0]) - 1
        possible = [newest for _, newest in self._newest[first:]]
        if chosen not in possible:
            self.fail(f"{who} takes {chosen} for the newest; it was {', '.join(map(str, possible))}")

    def heard(self, who: str, attempt: Attempt, *, rank: int) -> None:
        """Fail if a trainer is told that a step is committed which is not, or which nobody could ever find."""
        commit = self.commits.get(attempt)
        if commit is None and attempt not in self.given_up:
            self.fail(f"{who} is told that {attempt} is committed, and it is not")
        overtaken = any(number > attempt.generation for number in self.claims)
        if rank == 0 and not overtaken and attempt not in self.given_up and attempt not in self.counted().values():
            self.fail(f"{who} is told that {attempt} is committed, and it does not count")

    def failed(self, who: str, attempt: Attempt, kind: str, message: str) -> None:
        """Fail if a save fails for a reason that there is not."""
        overtaken = any(number > attempt.generation for number in self.claims)
        allowed = {ErrorKind.UNREACHABLE, ErrorKind.PEER_TIMEOUT, ErrorKind.PEER_FAILED}
        if attempt in self.given_up:
            allowed |= {ErrorKind.SAVE_FAILED}
        if overtaken:
            allowed |= {ErrorKind.TAKEN_OVER}
        if attempt in self.sick:
            allowed |= {ErrorKind.DIVERGENT, ErrorKind.INCOMPLETE}
        if kind not in allowed:
            self.fail(f"{who} cannot save {attempt}: {message} ({kind})")


def _durable(attempt: Attempt, part: Part, objects: dict[str, bytes]) -> bool:
    return attempt.receipt(part.receipt.rank) in objects and all(
        objects.get(key) == data for key, data in part.objects.items()
    )


def _based(key: str) -> int | None:
    """Return the generation that a key is the base of."""
    number = key.removeprefix(layout.GENERATIONS).removesuffix(".base.json")
    return int(number) if number.isdecimal() else None


def _decoded(kind: type[D], data: bytes, key: str) -> D:
    found: D = decode_document(kind, data, key)
    return found
