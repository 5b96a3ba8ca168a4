"""Saving and loading without a loop: the same engine, by hand."""

from __future__ import annotations

import operator
import os
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, SupportsIndex

import msgspec

from resilient.catalog.choosing import newest_unmarked, why_failed
from resilient.catalog.dcp.view import is_foreign, run_at
from resilient.catalog.generations import claim_generation, write_base
from resilient.catalog.launch import check_no_other_launch
from resilient.catalog.line import read_line
from resilient.catalog.run_info import open_run
from resilient.clock import SYSTEM_CLOCK
from resilient.config import read_process, read_settings
from resilient.engine.checkpoint import Checkpoint
from resilient.engine.handle import SaveHandle
from resilient.engine.peers import Peers
from resilient.engine.restore import load_into
from resilient.engine.same_place import check_same_place
from resilient.engine.save_settings import SaveSettings, save_settings
from resilient.engine.saver import Saver
from resilient.errors import ConflictError, ErrorKind, NotFoundError, UsageError
from resilient.events import Bus, FellBack, Notice, SaveFailed
from resilient.format.documents import Claim, Commit, decode_document, encode_document
from resilient.observe.logs import show_logs
from resilient.state.capturer import Capturer
from resilient.state.leaves import Captured
from resilient.store.base import Store
from resilient.store.open import open_store
from resilient.store.probe import probe
from resilient.store.retrying import Retrying
from resilient.writer.at_exit import before_threads_end

Place = str | os.PathLike[str] | Store

_PEER_TIMEOUT_S = 300.0
_STEP_LIMIT: Final = 10**12
"""Keys have twelve digits for the step."""


@dataclass(frozen=True, slots=True)
class _Remembered:
    """What was saved last into a place: if it is saved again, most of the capture is done already."""

    place: Store
    items: dict[str, object]
    peers: Peers
    capturer: Capturer

    def is_of(self, items: Mapping[str, object], peers: Peers) -> bool:
        same = self.items.keys() == items.keys() and all(self.items[name] is items[name] for name in items)
        return same and (self.peers.rank, self.peers.world_size) == (peers.rank, peers.world_size)


@dataclass(slots=True)
class _Session:
    """One generation that this process saves into one place; ``newest`` is the last step it continues from or saved."""

    store: Store
    peers: Peers
    saver: Saver
    newest: int | None


_sessions: dict[str, _Session] = {}
_remembered: dict[str, _Remembered] = {}
_continue_from: dict[str, tuple[Store, Commit]] = {}
_lock = threading.Lock()


def _close_all() -> None:
    """Give the saves that nobody waited for their time: a program may end right after its last save."""
    for session in list(_sessions.values()):
        session.saver.close(SaveSettings().commit_timeout_s)


def _forget_all() -> None:
    """A forked child has none of its parent's sessions: it would talk to their writers, and end them when it ends."""
    global _lock  # noqa: PLW0603 -- the parent's may be held for ever here
    _lock = threading.Lock()
    for known in (_sessions, _remembered, _continue_from):
        known.clear()


before_threads_end(_close_all)
os.register_at_fork(after_in_child=_forget_all)


def save(
    store: Place,
    step: SupportsIndex,
    items: Mapping[str, object],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> SaveHandle:
    """Save items as a step; return when their state is copied.

    On N ranks every rank calls this with the same step. The first save of a process into a place claims a generation
    there. The items of the last save into a place are kept alive until the next one, which is cheap if they are the
    same objects.

    Args:
        store: a URL, a path or a `Store`.
        step: completed steps of training, at least 0 and below 10**12; larger than that of any step that this process
            saved, or loaded, there.
        items: named modules, optimizers, objects with ``state_dict``/``load_state_dict``, or nested dicts.
        storage_options: for what reaches a URL; see `resilient.store.open.open_store`.

    Raises:
        UsageError: the step is no such number, or a leaf cannot be saved (it is named); nothing was written.
        ConflictError: the step, or a later one, is there already; or a training run lives there (kind ``run-in-use``).
    """
    step = _checked(step)
    peers = Peers.current()
    place = _open(store, storage_options)
    with _lock:
        captured = _captured(place, items, peers)
        session = _sessions.get(_key(place))
        if session is None or session.peers.world_size != peers.world_size:
            if session is not None:
                session.saver.close(_PEER_TIMEOUT_S)
            session = _sessions[_key(place)] = _start(place, peers)
        if session.newest is not None and step <= session.newest:
            raise ConflictError(
                f"{place.url}: step {session.newest} is there already, and step {step} is not after it",
                kind=ErrorKind.ALREADY_SAVED,
                hint="load an older step first to continue from there, or save to another place",
            )
        handle = session.saver.save(step, captured, reason="call")
        session.newest = step
    return handle


def load(
    store: Place,
    into: Mapping[str, object],
    step: int | Literal["latest"] = "latest",
    *,
    strict: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Fill items from a step, on any number of ranks and in any layout; every rank of the job calls this.

    Reads only what this rank needs, verifies every byte before it is used, and changes nothing if names, shapes or
    dtypes differ. A later `save` of this process into the same place continues from this step.

    Args:
        store: a URL, a path or a `Store`: a run, or what torch.distributed.checkpoint wrote.
        into: the items to fill, by name; other items of the checkpoint are left alone.
        step: a committed step, or "latest": the newest that nobody has marked failed.
        strict: False fills what is there on both sides and leaves the rest.
        storage_options: for what reaches a URL; see `resilient.store.open.open_store`.

    Raises:
        NotFoundError: nothing is there, or not this step.
        UsageError: names, shapes or dtypes differ; all of them are listed.
        CorruptError: stored bytes are wrong; ``into`` is then spoiled. Or (kind ``nothing-usable``) "latest" is asked
            for, and every checkpoint is marked failed.
    """
    peers = Peers.current()
    place = _open(store, storage_options)
    with _lock:
        session = _sessions.get(_key(place))
    if session is not None:
        session.saver.drain(_PEER_TIMEOUT_S)  # what this process is just saving is what "latest" means to it

    bus = Bus()
    show_logs(bus, only=(FellBack, Notice))

    def decide() -> bytes:
        return encode_document(_choose(run_at(place), step, bus))

    chosen: Commit = decode_document(Commit, peers.share(peers.numbered("load"), decide, _PEER_TIMEOUT_S), "the choice")
    if is_foreign(chosen):  # DCP's: nobody continues from it in the same place
        source = run_at(place)
        load_into(source, into, peers, chosen, strict=strict, bus=Bus())
        return Checkpoint(source, chosen)
    load_into(place, into, peers, chosen, strict=strict, bus=Bus())
    with _lock:
        if session is not None and session.newest != chosen.step:
            _sessions.pop(_key(place), None)  # continuing from an older step takes a generation of its own
            session.saver.close(_PEER_TIMEOUT_S)
        _continue_from[_key(place)] = place.inner, chosen
    return Checkpoint(place, chosen)


def checkpoints(store: Place, *, storage_options: Mapping[str, Any] | None = None) -> list[Checkpoint]:
    """Return the committed checkpoints of a run, newest first; an empty place has none."""
    place = _open(store, storage_options)
    try:
        source = run_at(place)
    except NotFoundError:
        return []
    return [Checkpoint(source, commit) for commit in read_line(source).commits]


def _key(place: Retrying) -> str:
    """Return what tells places apart: two of one URL are two if their stores or options are."""
    described = place.recipe
    return (
        f"{place.url} {id(place.inner)}"
        if described is None
        else f"{described.url} {sorted(described.options.items())}"
    )


def _captured(place: Retrying, items: Mapping[str, object], peers: Peers) -> Captured:
    known = _remembered.get(_key(place))
    if known is not None and isinstance(items, dict) and known.is_of(items, peers):
        return known.capturer.capture()
    capturer = Capturer(items, rank=peers.rank, world_size=peers.world_size)
    captured = capturer.capture()
    _remembered[_key(place)] = _Remembered(place.inner, dict(items), peers, capturer)
    return captured


def _checked(step: object) -> int:
    """Return a step as the int that it is, numpy's included."""
    try:
        number = operator.index(step) if not isinstance(step, bool) else -1  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < _STEP_LIMIT:
        raise UsageError(
            f"step {step!r} is not a whole number of at least 0 and below 10**12",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint="pass the number of completed training steps",
        )
    return number


def _open(store: Place, storage_options: Mapping[str, Any] | None) -> Retrying:
    return open_store(store, storage_options=storage_options)


def _choose(store: Store, step: int | Literal["latest"], bus: Bus) -> Commit:
    line = read_line(store)
    if step != "latest":
        asked_for = line.at(step)
        why = why_failed(store, asked_for)
        if why is not None:
            bus.emit(Notice(message=f"step {step} is {why}; it is loaded because it was asked for"))
        return asked_for
    if not line.commits:
        raise NotFoundError(f"{store.url} holds no committed checkpoint", kind=ErrorKind.NO_CHECKPOINT)
    return newest_unmarked(store, line, lambda commit, why: bus.emit(FellBack(step=commit.step, why=why)))


def _start(store: Retrying, peers: Peers) -> _Session:
    """Claim a generation on rank 0, say where it continues from, and tell the others."""
    how = save_settings(read_settings(), None, read_process().local_world_size)  # refused before anything is written
    probe(store)
    bus = Bus()
    show_logs(bus, only=(SaveFailed, Notice))  # of what goes well, the handle tells

    def claim() -> bytes:
        launch = uuid.uuid4().hex
        run_id = open_run(store, create=True, clock=SYSTEM_CLOCK).run_id
        # A generation of this process would take all that the run saves from now on off the line.
        check_no_other_launch(store, launch=launch, takeover=False, clock=SYSTEM_CLOCK)
        commits = read_line(store).commits
        _, loaded = _continue_from.get(_key(store), (store, None))
        continues = loaded or (commits[0] if commits else None)
        mine = claim_generation(store, world_size=peers.world_size, launch=launch, heartbeat=False)
        write_base(store, mine, continues)
        newest = None if continues is None else continues.step
        if newest is not None and newest < commits[0].step:
            what = f"steps up to {commits[0].step} were saved after it, and do not count from now on"
            bus.emit(Notice(message=f"{store.url} continues from step {newest}, which was loaded: {what}"))
        return msgspec.msgpack.encode((encode_document(mine), run_id, newest, store.url))

    shared = peers.share(peers.numbered("claim"), claim, _PEER_TIMEOUT_S)
    document, run_id, newest, url = msgspec.msgpack.decode(shared, type=tuple[bytes, str, int | None, str])
    claimed: Claim = decode_document(Claim, document, "the claim")
    check_same_place(store, claimed, peers, made_in=url, timeout_s=_PEER_TIMEOUT_S, clock=SYSTEM_CLOCK)
    saver = Saver(store, claimed, peers, how, run_id=run_id, bus=bus)
    return _Session(store=store, peers=peers, saver=saver, newest=newest)
