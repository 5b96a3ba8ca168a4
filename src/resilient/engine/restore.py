"""Bringing a run back: one decision for all ranks, verified reads, and the next older step where one is not usable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import msgspec

from resilient.catalog.choosing import nothing_usable, passed_over
from resilient.catalog.contents import Contents, open_manifest
from resilient.catalog.line import read_line
from resilient.catalog.marks import reading
from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.engine.exchange import fill_together
from resilient.engine.peers import Peers, pack, pack_error, unpack
from resilient.errors import CorruptError, ErrorKind, NotFoundError, PeerError, ResilientError
from resilient.events import Bus, FellBack, Notice, Restored, RestoreStarted
from resilient.format.documents import Commit, decode_document, encode_document
from resilient.state.collector import nothing_collected
from resilient.state.prepare import Loading, mismatch, prepare, unexpected_line
from resilient.store.base import Store

Resume: TypeAlias = Literal["auto", "required", "never"]
_CANDIDATES: Final = 50
_Name: TypeAlias = tuple[str, str]
"""An item, and the name of a tensor in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredFrom:
    """Where the state of the items comes from now."""

    commit: Commit
    nbytes_read: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidates:
    """``failed``: for each of ``commits`` who has marked it failed, and why; None if nobody has."""

    commits: tuple[Commit, ...]
    failed: tuple[str | None, ...]
    ignored: tuple[str, ...]


def restore(
    store: Store,
    items: Mapping[str, object],
    peers: Peers,
    *,
    resume: Resume,
    strict: bool = True,
    bus: Bus,
    timeout_s: float = 1800.0,
    clock: Clock = SYSTEM_CLOCK,
) -> RestoredFrom | None:
    """Fill the items from the newest usable step of the line; all ranks call this, and all get the same step.

    Rank 0 decides on the candidates; a step counts as usable when nobody has marked it failed, every rank has read all
    that it needs of it and every digest was right. Else the next older one is taken, with an event that says why.

    Returns:
        What was restored; None for a fresh start: ``resume`` is "never", or is "auto" and the place holds no commit at
        all.

    Raises:
        NotFoundError: ``resume`` is "required" and there is nothing.
        CorruptError: there are commits, and none is usable.
        UsageError: the items and the checkpoint differ; everything that does is listed, and nothing was changed.
    """
    if resume == "never":
        return None
    found = _candidates(store, peers, timeout_s)
    if peers.rank == 0:
        for why in found.ignored:
            bus.emit(Notice(message=f"ignored: {why}"))
    if not found.commits and not found.ignored:
        if resume == "required":
            raise _nothing(store)
        return None
    reasons = list(found.ignored)
    touched: set[_Name] = set()
    for commit, marked in zip(found.commits, found.failed, strict=True):
        if marked is not None:
            reasons.append(f"step {commit.step}: {marked}")
            bus.emit(FellBack(rank=peers.rank, step=commit.step, why=marked))
            continue
        started_s = clock.monotonic()
        bus.emit(RestoreStarted(rank=peers.rank, step=commit.step, generation=commit.generation, nonce=commit.nonce))
        try:
            nbytes = _restore_one(store, items, peers, commit, bus, timeout_s, strict=strict, touched=touched)
        except (CorruptError, NotFoundError) as error:
            reasons.append(f"step {commit.step}: {error}")
            bus.emit(FellBack(rank=peers.rank, step=commit.step, why=str(error)))
            continue
        bus.emit(
            Restored(
                rank=peers.rank,
                step=commit.step,
                generation=commit.generation,
                saved_world_size=commit.world_size,
                nbytes_read=nbytes,
                duration_s=clock.monotonic() - started_s,
            )
        )
        return RestoredFrom(commit=commit, nbytes_read=nbytes)
    raise nothing_usable(store, reasons, marked=any(found.failed))


def load_into(
    store: Store,
    items: Mapping[str, object],
    peers: Peers,
    commit: Commit,
    *,
    strict: bool = True,
    bus: Bus,
    timeout_s: float = 1800.0,
) -> int:
    """Fill the items from this very step, on all ranks or with an error on all; return the bytes read by this rank."""
    return _restore_one(store, items, peers, commit, bus, timeout_s, strict=strict, touched=None)


def _candidates(store: Store, peers: Peers, timeout_s: float) -> _Candidates:
    def decide() -> bytes:
        line = read_line(store)
        chosen = line.commits[:_CANDIDATES]
        commits = [encode_document(commit) for commit in chosen]
        return msgspec.msgpack.encode((commits, passed_over(store, line, chosen), line.ignored))

    shared = peers.share(peers.numbered("candidates"), decide, timeout_s)
    commits, failed, ignored = msgspec.msgpack.decode(shared, type=tuple[list[bytes], list[str | None], list[str]])
    return _Candidates(
        commits=tuple(decode_document(Commit, each, "a candidate") for each in commits),
        failed=tuple(failed),
        ignored=tuple(ignored),
    )


def _restore_one(
    store: Store,
    items: Mapping[str, object],
    peers: Peers,
    commit: Commit,
    bus: Bus,
    timeout_s: float,
    *,
    strict: bool,
    touched: set[_Name] | None,
) -> int:
    """Fill the items from one step, which is marked as being read meanwhile.

    ``touched``: what steps that turned out to be damaged may have overwritten, to which this step adds its own; None if
    there is no falling back, and other items of the checkpoint are left alone.

    Two agreements: before anything is touched (so that a mismatch on one rank changes nothing on any), and before the
    values are installed (so that all ranks have this step, or none keeps it).
    """
    notices: list[str] = []
    plan: list[tuple[Contents, Loading]] = []
    marked = ExitStack()  # one mark is enough for all: rank 0 is done when everybody is

    def look() -> bytes:
        if peers.rank == 0:
            marked.enter_context(reading(store, commit))
        with nothing_collected():
            manifest = open_manifest(store, commit)
        rank, world_size = peers.rank, peers.world_size
        loading = prepare(
            items,
            manifest,
            rank=rank,
            world_size=world_size,
            strict=strict,
            whole=touched is not None,
            notices=notices,
        )
        if touched and not strict:  # else what the newer step has and this one lacks is a mismatch, or was never in use
            _check_refills(touched, loading)
        plan.append((manifest, loading))
        return msgspec.msgpack.encode(loading.unexpected)

    def read() -> bytes:
        ((manifest, loading),) = plan
        if touched is not None:
            touched.update(_names(loading))
        return str(fill_together(store, manifest, loading.targets, peers, timeout_s)).encode()

    with marked:
        unexpected = _on_all(_together(peers, "prepared", look, timeout_s))
        if unexpected:
            raise mismatch(commit.step, [unexpected_line(name) for name in unexpected])
        try:
            nbytes = int(_together(peers, "read", read, timeout_s)[peers.rank])
        except CorruptError as error:
            error.add_note("the destination is spoiled: parts of it were already replaced")
            raise
    for notice in notices:
        bus.emit(Notice(rank=peers.rank, message=notice))
    plan[0][1].finish()
    return nbytes


def _names(loading: Loading) -> set[_Name]:
    return {(target.tensor.item, target.tensor.name) for target in loading.targets}


def _check_refills(touched: set[_Name], loading: Loading) -> None:
    """Refuse a step that lacks what a newer one, which turned out to be damaged, has overwritten already."""
    stale = sorted(touched - _names(loading))
    if stale:
        raise CorruptError(
            f"it lacks {', '.join('.'.join(name) for name in stale[:5])}{', ...' if len(stale) > 5 else ''}, "
            "where values of a newer, damaged step are already",
            kind=ErrorKind.INCOMPLETE,
            hint="load this very step in a new process",
        )


def _together(peers: Peers, topic: str, work: Callable[[], bytes], timeout_s: float) -> list[bytes]:
    """Do this rank's part; return all ranks' results once every rank has done its own, or raise one error on all."""
    own_error: Exception | None = None
    try:
        mine = pack(work())
    except ResilientError as error:
        error.rank = peers.rank if error.rank is None else error.rank
        mine, own_error = pack_error(error), error
    except Exception as error:  # noqa: BLE001 -- boundary: the others must hear of it at once, not wait for their deadline
        stand_in = PeerError(f"rank {peers.rank}: {error!r}", kind=ErrorKind.PEER_FAILED, rank=peers.rank)
        stand_in.__cause__ = error  # on this rank: whose failure it is
        mine, own_error = pack_error(stand_in), error
    answers = peers.gather(peers.numbered(topic), mine, timeout_s)
    errors = [error for error in map(_error_in, answers) if error is not None]
    if not errors:
        return [unpack(answer) for answer in answers]
    # All ranks must draw the same conclusion: what only an older step can mend counts last.
    chosen = min(errors, key=lambda error: isinstance(error, CorruptError | NotFoundError))
    raise own_error if own_error is not None and str(own_error) == str(chosen) else chosen


def _on_all(answers: Sequence[bytes]) -> list[str]:
    """Return the names that every rank gave, in the order of rank 0."""
    first, *others = (msgspec.msgpack.decode(answer, type=list[str]) for answer in answers)
    return [name for name in first if all(name in other for other in others)]


def _error_in(answer: bytes) -> ResilientError | None:
    try:
        unpack(answer)
    except ResilientError as error:
        return error
    return None


def _nothing(store: Store) -> NotFoundError:
    return NotFoundError(
        f"{store.url}: there is no checkpoint to resume from, and resume is 'required'",
        kind=ErrorKind.NO_CHECKPOINT,
        hint="check the place; resume='auto' starts fresh where there is nothing",
    )
