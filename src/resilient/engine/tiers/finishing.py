"""At a start, the newest state that is complete over what survives is finished: copied to the store, and committed.

The idea is that of T. Gupta et al., "Just-In-Time Checkpointing: Low Cost Error Recovery from Deep Learning Training
Failures", EuroSys 2024: after a failure the newest state is still in the memory of those that survive. As in Z. Wang et
al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints", SOSP 2023, it is taken from
copies in host memory that were made at a step's boundary, never from the live tensors: after an abort some ranks may
have stepped and others not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from resilient.catalog.commit import try_commit
from resilient.catalog.line import read_chain, read_line
from resilient.catalog.marks import is_failed
from resilient.catalog.once import create_once, exists
from resilient.catalog.outcomes import read_outcome
from resilient.catalog.parallel import each as for_each
from resilient.clock import Clock, Deadline
from resilient.engine.peers import Peers, pack, pack_error, unpack
from resilient.errors import ConflictError, CorruptError, ErrorKind, PeerError, ResilientError, StoreError
from resilient.events import Bus, Notice, TiersFinished
from resilient.format import layout
from resilient.format.documents import Commit, Receipt, decode_document, encode_document
from resilient.format.layout import Attempt
from resilient.policy.demotion import NUMERIC
from resilient.store.base import Store
from resilient.store.local import LocalStore
from resilient.store.nearest import Shards
from resilient.store.throttled import Bandwidth, throttled
from resilient.writer.copying import mapped
from resilient.writer.presence import TIERING, in_flight

REASON: Final = "tiers"
_TRIES: Final = 3
_WRITERS_S: Final = 60.0
_POLL_S: Final = 0.02


class _Part(msgspec.Struct, array_like=True, frozen=True):
    """One rank's part of an attempt, which a tier holds."""

    step: int
    generation: int
    nonce: str
    rank: int
    world_size: int

    @property
    def attempt(self) -> Attempt:
        return Attempt(step=self.step, generation=self.generation, nonce=self.nonce)


class _Plan(msgspec.Struct, array_like=True, frozen=True):
    """Which attempt is finished; ``copies``: which rank of the new world brings which rank's part to the store."""

    step: int
    generation: int
    nonce: str
    world_size: int
    copies: dict[int, int]

    @property
    def attempt(self) -> Attempt:
        return Attempt(step=self.step, generation=self.generation, nonce=self.nonce)


class Finishing:
    """Looks for the newest state that is complete over the tiers of all nodes and the store; every rank takes part."""

    def __init__(
        self,
        store: Store,
        tiers: Sequence[tuple[LocalStore, Shards]],
        peers: Peers,
        *,
        generation: int,
        max_bandwidth: float | None,
        timeout_s: float,
        bus: Bus,
        clock: Clock,
    ) -> None:
        """``generation`` is the new one; what it begins with must not be continued elsewhere meanwhile."""
        self._store = store
        bandwidth = None if max_bandwidth is None else Bandwidth(max_bandwidth, clock=clock)
        self._data = store if bandwidth is None else throttled(store, bandwidth)
        self._tiers = tiers
        self._peers = peers
        self._generation = generation
        self._timeout_s = timeout_s
        self._bus = bus
        self._clock = clock

    def finish(self, run_id: str) -> Commit | None:
        """Commit the newest state that is newer than every commit of the line; None if there is none.

        One that cannot be finished is told of, and the next older one is tried; the commits that there are stay what
        they are.
        """
        _await_writers(run_id, self._generation, self._clock)
        mine = msgspec.msgpack.encode([each for store, shards in self._tiers for each in self._parts(store, shards)])
        answers = self._peers.gather(self._topic("held"), mine, self._timeout_s)
        tried: set[Attempt] = set()
        for _ in range(_TRIES):
            chosen = self._peers.share(self._topic("plan"), lambda: self._plan(answers, tried), self._timeout_s)
            plan = msgspec.msgpack.decode(chosen, type=_Plan | None)
            if plan is None:
                return None
            commit = self._carry_out(plan)
            if commit is not None:
                return commit
            tried.add(plan.attempt)
        return None

    def _topic(self, what: str) -> str:
        return self._peers.numbered(f"tiers-{what}")

    def _parts(self, store: LocalStore, shards: Shards) -> Iterator[_Part]:
        try:
            keys = list(store.list(layout.STEPS))
        except StoreError as error:  # a disk that is broken must not keep the run from starting without it
            self._tell(f"the tier {shards.name} cannot be read, and nothing in it is finished: {error}")
            return
        for key in keys:
            parsed = layout.parse_attempt(key)
            if parsed is None or not parsed[1].startswith("receipts/") or parsed[0].generation >= self._generation:
                continue
            attempt, rank = parsed[0], parsed[1].removeprefix("receipts/")
            receipt = shards.receipt(attempt, int(rank)) if rank.isdecimal() else None
            if receipt is not None:
                yield _Part(attempt.step, attempt.generation, attempt.nonce, receipt.rank, receipt.world_size)

    # --- rank 0 decides -----------------------------------------------------------------------------------------------

    def _plan(self, answers: Sequence[bytes], tried: set[Attempt]) -> bytes:
        holders: defaultdict[Attempt, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        sizes: dict[Attempt, int] = {}
        for holder, answer in enumerate(answers):
            for part in msgspec.msgpack.decode(answer, type=list[_Part]):
                if part.attempt not in tried:
                    holders[part.attempt][part.rank].append(holder)
                    sizes[part.attempt] = part.world_size
        return msgspec.msgpack.encode(self._newest(holders, sizes) if holders else None)

    def _newest(self, holders: dict[Attempt, defaultdict[int, list[int]]], sizes: dict[Attempt, int]) -> _Plan | None:
        line = read_line(self._store)
        newest = line.commits[0].step if line.commits else -1
        chain = read_chain(self._store, [*holders, *(commit.attempt for commit in line.commits[:1])])
        newer = [attempt for attempt in sorted(holders, reverse=True) if attempt.step > newest]
        hopeful = self._sound([attempt for attempt in newer if chain.holds(attempt)])
        failed = is_failed(self._store, line.commits[0].attempt) if hopeful and line.commits else None
        if failed is not None:
            # What came after it continued from it, so that to finish that would undo the mark.
            why = f"{line.commits[0].attempt}, which it continues, is marked failed ({failed.why})"
            self._tell(f"{hopeful[0]} is left in the tiers: {why}")
            return None
        for attempt in hopeful:
            parts, world_size = holders[attempt], sizes[attempt]
            receipts = [attempt.receipt(rank) for rank in range(world_size)]
            there = for_each(lambda key: exists(self._store, key), receipts)
            stored = {rank for rank, found in enumerate(there) if found}
            if set(range(world_size)) <= stored | set(parts) and not exists(self._store, attempt.tombstone):
                copies = _shared_out({rank: by for rank, by in parts.items() if rank not in stored})
                return _Plan(attempt.step, attempt.generation, attempt.nonce, world_size, copies)
        return None

    def _sound(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """Leave out those of lives that ended with a loss that was no number, or the like: they may have it too."""
        outcomes = {number: read_outcome(self._store, number) for number in {each.generation for each in attempts}}
        poisoned = {number for number, found in outcomes.items() if found is not None and found.cause == NUMERIC}
        left = [attempt for attempt in attempts if attempt.generation in poisoned]
        if left:
            self._tell(f"{left[0]} is left in the tiers: the life that made it ended with a numeric failure")
        return [attempt for attempt in attempts if attempt.generation not in poisoned]

    # --- all ranks copy -----------------------------------------------------------------------------------------------

    def _carry_out(self, plan: _Plan) -> Commit | None:
        started_s = self._clock.monotonic()
        attempt = plan.attempt
        self._tell(f"{attempt} is complete in the tiers of the nodes and newer than what is committed: it is finished")
        mine = sorted(rank for rank, holder in plan.copies.items() if holder == self._peers.rank)
        # Both at once: whoever gives up after the first must count as those do who go on.
        copied, committed = self._topic("copied"), self._topic("committed")
        outcome = _outcome(lambda: str(self._copy(attempt, mine)).encode())
        try:
            answers = self._peers.gather(copied, outcome, self._timeout_s)
            nbytes = sum(int(unpack(answer)) for answer in answers)
            packed = self._peers.share(committed, lambda: self._commit(plan), self._timeout_s)
        except ResilientError as error:
            self._tell(f"{attempt} cannot be finished from the tiers: {error}")
            return None
        duration_s = self._clock.monotonic() - started_s
        commit: Commit = decode_document(Commit, packed, "the commit")
        event = TiersFinished(rank=self._peers.rank, step=commit.step, nbytes=nbytes, duration_s=duration_s)
        self._bus.emit(event)
        return commit

    def _copy(self, attempt: Attempt, ranks: Sequence[int]) -> int:
        """Bring some ranks' parts to the store, data before receipt; return their bytes."""
        nbytes = 0
        for rank in ranks:
            store, receipt = self._whole(attempt, rank)
            for each in receipt.objects:
                with mapped(store, each.key, each.nbytes) as content:
                    self._data.put(each.key, [content])
                nbytes += each.nbytes
            # Another one may be there by now, from a writer that was slow: then that one counts, with its own data.
            create_once(self._store, attempt.receipt(rank), store.get(attempt.receipt(rank)))
        return nbytes

    def _whole(self, attempt: Attempt, rank: int) -> tuple[LocalStore, Receipt]:
        for store, shards in self._tiers:
            receipt = shards.receipt(attempt, rank)
            if receipt is not None and all(shards.holds(each.key) for each in receipt.objects):
                return store, receipt
        raise CorruptError(
            f"the part of rank {rank} in {attempt} is damaged in the tiers of this node", kind=ErrorKind.BAD_DIGEST
        )

    def _commit(self, plan: _Plan) -> bytes:
        outcome = try_commit(
            self._store,
            plan.attempt,
            world_size=plan.world_size,
            committer=0,
            reason=REASON,
            clock=self._clock,
        )
        if not isinstance(outcome, Commit):
            who = ", ".join(map(str, outcome))
            raise ConflictError(f"the receipts of rank {who} are gone", kind=ErrorKind.INCOMPLETE)
        return encode_document(outcome)

    def _tell(self, message: str) -> None:
        self._bus.emit(Notice(rank=self._peers.rank, message=message))


def _await_writers(run_id: str, generation: int, clock: Clock) -> None:
    """Wait for states that living writers of this host are just writing to its tiers: that is a copy in memory."""
    deadline = Deadline(clock, _WRITERS_S)
    while not deadline.expired:
        if not any(each.phase == TIERING and each.generation < generation for each in in_flight(run_id)):
            return
        clock.sleep(_POLL_S)


def _shared_out(holders: dict[int, list[int]]) -> dict[int, int]:
    """Return for each part one of its holders, so that all have about as many to copy."""
    busy: defaultdict[int, int] = defaultdict(int)
    chosen = {}
    for part, by in sorted(holders.items()):
        chosen[part] = min(by, key=lambda holder: (busy[holder], holder))
        busy[chosen[part]] += 1
    return chosen


def _outcome(work: Callable[[], bytes]) -> bytes:
    """Return what a part of the work gave, or its error: the others wait for a word about it."""
    try:
        return pack(work())
    except ResilientError as error:
        return pack_error(error)
    except Exception as error:  # noqa: BLE001 -- boundary: see above
        return pack_error(PeerError(f"{type(error).__name__}: {error}", kind=ErrorKind.PEER_FAILED))
