"""Sixteen bugs, made by hand, to be switched on: a test that holds with any of them on proves less than it says.

Each is a mistake that a checkpoint library can well be shipped with, and that no run without a fault ever shows::

    with planted("commit-before-data"), pytest.raises(AssertionError):
        fail_each_operation(MemoryStore, scenario)

They patch this library in this process, and are undone at the end of the block: saves must go through a writer in a
thread, as with every store that no other process can open, such as `FaultyStore`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from resilient.catalog import commit as committing
from resilient.catalog import coverage, fetch, generations, line, marks, merge, once, references, tombstones
from resilient.catalog import prune as pruning
from resilient.catalog.coverage import Covered
from resilient.catalog.once import exists
from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.errors import ErrorKind, UsageError
from resilient.format.chunks import NOT_HERE, Chunks
from resilient.format.digest import BytesLike
from resilient.format.documents import Base, Claim, Commit, Receipt
from resilient.format.layout import Attempt
from resilient.store import local
from resilient.store.base import Store
from resilient.store.local import LocalStore
from resilient.writer import persisting, sharing
from resilient.writer.committing import Committer
from resilient.writer.messages import Save
from resilient.writer.persisting import Persister, Staged
from resilient.writer.worker import Worker

_Plant: TypeAlias = Callable[[ExitStack], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A mistake; ``what`` says what is done instead of what should be, ``plant`` makes it until a stack is closed."""

    what: str
    plant: _Plant


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Have one of the `BUGS` in this library, in this process, until the block ends.

    Raises:
        UsageError: there is no such bug.
    """
    bug = BUGS.get(name)
    if bug is None:
        raise UsageError(
            f"there is no bug {name!r}",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint=f"there are {', '.join(BUGS)}",
        )
    with ExitStack() as stack:
        bug.plant(stack)
        yield


# --- in which order a save is written ---------------------------------------------------------------------------------


class _Later:
    """A store whose puts only take note."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, bytes]] = []

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        self.kept.append((key, b"".join(parts)))


def _commit_before_data(stack: ExitStack) -> None:
    send, committed = Persister._send, Persister.committed
    waiting: WeakKeyDictionary[Persister, _Later] = WeakKeyDictionary()

    def send_later(self: Any, *arguments: Any) -> Any:
        data, self._data = self._data, _Later()
        waiting[self] = self._data
        try:
            return send(self, *arguments)
        finally:
            self._data = data

    def send_now(self: Any, attempt: Attempt) -> None:
        for key, content in waiting.pop(self, _Later()).kept:
            self._data.put(key, [content])
        committed(self, attempt)

    _patch(stack, Persister, "_send", send_later)
    _patch(stack, Persister, "committed", send_now)


def _late_base(stack: ExitStack) -> None:
    write_base, commit = generations.write_base, Committer.commit
    waiting: defaultdict[str, list[tuple[Store, Claim, Commit | None]]] = defaultdict(list)

    def write_later(store: Store, claim: Claim, continues: Commit | None) -> Base:
        waiting[claim.nonce].append((store, claim, continues))
        base = Base(generation=claim.generation, nonce=claim.nonce)
        return base if continues is None else replace(base, step=continues.step, manifest=continues.manifest)

    def commit_first(self: Any, attempt: Attempt, *arguments: Any) -> Commit:
        done = commit(self, attempt, *arguments)
        for each in waiting.pop(attempt.nonce, []):
            write_base(*each)
        return done

    _everywhere(stack, write_base, write_later)
    _patch(stack, Committer, "commit", commit_first)


def _late_references(stack: ExitStack) -> None:
    refer, committed = references.refer, Persister.committed
    waiting: defaultdict[Attempt, list[tuple[Any, ...]]] = defaultdict(list)

    def refer_later(store: Store, base: Attempt, by: Attempt, through: Attempt | None = None) -> bool:
        waiting[by].append((store, base, by, through))
        return store.capabilities.conditional_create

    def refer_now(self: Any, attempt: Attempt) -> None:
        for each in waiting.pop(attempt, []):
            refer(*each)
        committed(self, attempt)

    def believe(*_: object) -> None: ...

    _patch(stack, sharing, "refer", refer_later)
    _patch(stack, Persister, "committed", refer_now)
    _patch(stack, committing, "check_references", believe)


def _no_slot_recheck(stack: ExitStack) -> None:
    check, write = Staged.check, Persister._write
    writing: set[int] = set()

    def write_checking(self: Any, staged: Staged, *arguments: Any) -> Any:
        writing.add(id(staged))
        try:
            return write(self, staged, *arguments)
        finally:
            writing.discard(id(staged))

    def check_before(self: Staged) -> None:
        if id(self) in writing:
            check(self)

    _patch(stack, Persister, "_write", write_checking)
    _patch(stack, Staged, "check", check_before)


# --- what a commit proves ---------------------------------------------------------------------------------------------


def _no_coverage_check(stack: ExitStack) -> None:
    cover = coverage.cover

    def believe(*arguments: Any) -> Covered:
        return replace(cover(*arguments), wrong=np.empty(0, np.int64))

    _patch(stack, merge, "cover", believe)


def _receipts_list_only_stored(stack: ExitStack) -> None:
    write_receipt = committing.write_receipt

    def write(store: Store, receipt: Receipt) -> None:
        chunks = [chunk for chunk in receipt.chunks if chunk.object != NOT_HERE]
        stored = sorted({chunk.tensor for chunk in chunks})
        numbers = {old: new for new, old in enumerate(stored)}
        shorter = msgspec.structs.replace(
            receipt,
            tensors=tuple(receipt.tensors[number] for number in stored),
            chunks=Chunks.of(msgspec.structs.replace(chunk, tensor=numbers[chunk.tensor]) for chunk in chunks),
        )
        write_receipt(store, shorter)

    _patch(stack, persisting, "write_receipt", write)


def _one_manifest_name(stack: ExitStack) -> None:
    create_once = once.create_once

    def name(self: Attempt, _: str) -> str:
        return f"{self.prefix}manifest-all"

    def put(store: Store, key: str, data: bytes) -> bool:
        if not key.endswith("/manifest-all"):
            return create_once(store, key, data)
        store.put(key, [data])
        return True

    _patch(stack, Attempt, "manifest", name)
    _patch(stack, committing, "create_once", put)


# --- what is read, and believed ---------------------------------------------------------------------------------------


class _Equal(bytes):
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


def _no_digest_check(stack: ExitStack) -> None:
    def digest(_: BytesLike) -> bytes:
        return _Equal()

    _patch(stack, fetch, "digest", digest)
    _patch(stack, importlib.import_module("resilient.engine.read"), "digest", digest)


def _highest_step_is_latest(stack: ExitStack) -> None:
    read_line = line.read_line

    def read_all(store: Store) -> line.Line:
        found = {
            attempt: commit
            for attempt, names in line.list_attempts(store).items()
            if "COMMIT" in names
            and not exists(store, attempt.tombstone)
            and (commit := committing.read_commit(store, attempt)) is not None
        }
        commits = {commit.step: commit for _, commit in sorted(found.items())}
        return replace(read_line(store), commits=tuple(commits[step] for step in sorted(commits, reverse=True)))

    _everywhere(stack, read_line, read_all)


def _trusted_list(stack: ExitStack) -> None:
    def newest_number(store: Store) -> int:
        return max(generations.claimed_numbers(store), default=0)

    def absent(store: Store, attempt: Attempt, world_size: int) -> tuple[int, ...]:
        listed = set(store.list(attempt.receipts))
        return tuple(rank for rank in range(world_size) if attempt.receipt(rank) not in listed)

    _everywhere(stack, generations.newest_number, newest_number)
    _patch(stack, committing, "_absent", absent)


def _unmarked_reader(stack: ExitStack) -> None:
    @contextmanager
    def reading(store: Store, commit: Commit, clock: Clock = SYSTEM_CLOCK) -> Iterator[None]:  # noqa: ARG001 -- as theirs
        if exists(store, commit.attempt.tombstone):
            raise marks._being_deleted(commit.attempt)
        yield

    _everywhere(stack, marks.reading, reading)


# --- what is deleted --------------------------------------------------------------------------------------------------


def _prune_before_commit(stack: ExitStack) -> None:
    persist = Worker._persist

    def persist_and_prune(self: Any, order: Save, attempt: Attempt) -> None:
        persist(self, order, attempt)
        keep = self._opened.keep
        if keep is None or self._opened.rank != 0:
            return
        for commit in line.read_line(self._store).commits[keep.last - 1 :]:  # this step will be one of them
            pruning.give_up(self._store, commit.attempt, self._clock, reason="retention")

    _patch(stack, Worker, "_persist", persist_and_prune)


def _commit_removed(stack: ExitStack) -> None:
    def remove(store: Store, attempt: Attempt, *_: object, **__: object) -> None:
        store.delete(attempt.commit)

    def is_gone(store: Store, attempt: Attempt, *_: object) -> bool:
        return not exists(store, attempt.commit)

    _everywhere(stack, tombstones.bury, remove)
    _patch(stack, pruning, "is_given_up", is_gone)


# --- what a store does ------------------------------------------------------------------------------------------------


def _no_directory_fsync(stack: ExitStack) -> None:
    def hope(_: object) -> None: ...

    _patch(stack, local, "_sync_folder", hope)


def _exclusive_create(stack: ExitStack) -> None:
    def create(self: Any, key: str, data: bytes) -> bool:
        path = self._path(key)
        self._make_durable(path.parent)
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            return bool(path.read_bytes() == data)
        try:
            local._write(file, [memoryview(data)])
            os.fsync(file)
        finally:
            os.close(file)
        local._sync_folder(path.parent)
        return True

    _patch(stack, LocalStore, "create", create)


def _no_own_write_recognition(stack: ExitStack) -> None:
    for module, name in _STORES:
        owner = getattr(sys.modules.get(module), name, None)
        if owner is not None:
            _patch(stack, owner, "create", _forgetting(owner.create))


_STORES: Final = (
    ("resilient.store.memory", "MemoryStore"),
    ("resilient.store.local", "LocalStore"),
    ("resilient.store.fsspec_store", "FsspecStore"),
    ("resilient.store.object_store", "ObjectStore"),
    ("resilient.store.s3", "S3Store"),
)


def _forgetting(create: Callable[[Any, str, bytes], bool]) -> Callable[[Any, str, bytes], bool]:
    def forget(self: Any, key: str, data: bytes) -> bool:
        return not exists(self, key) and create(self, key, data)

    return forget


# --- planting ---------------------------------------------------------------------------------------------------------


def _patch(stack: ExitStack, owner: Any, name: str, value: object) -> None:
    before = vars(owner)[name]
    setattr(owner, name, value)
    stack.callback(setattr, owner, name, before)


def _everywhere(stack: ExitStack, original: object, instead: object) -> None:
    """Exchange a function in every module that has it, also in those that import it meanwhile."""

    def exchange(old: object, new: object) -> None:
        for module in list(sys.modules.values()):
            for name, value in list((getattr(module, "__dict__", None) or {}).items()):
                if value is old:
                    setattr(module, name, new)

    stack.callback(exchange, instead, original)
    exchange(original, instead)


BUGS: Final[Mapping[str, Bug]] = MappingProxyType(
    {
        "commit-before-data": Bug(what="data is written after the COMMIT that names it", plant=_commit_before_data),
        "no-directory-fsync": Bug(
            what="a directory is not synced after a file came into it", plant=_no_directory_fsync
        ),
        "exclusive-create": Bug(
            what="an object is created empty, then written, not linked whole", plant=_exclusive_create
        ),
        "highest-step-is-latest": Bug(
            what="the highest step of all generations is the newest, not that of the line",
            plant=_highest_step_is_latest,
        ),
        "late-base": Bug(what="a generation says where it continues after its first commit", plant=_late_base),
        "no-digest-check": Bug(what="what is read is not compared with its digest", plant=_no_digest_check),
        "prune-before-commit": Bug(
            what="retention runs before the commit, and counts what is not there yet", plant=_prune_before_commit
        ),
        "commit-removed": Bug(what="giving up removes the COMMIT and writes no TOMBSTONE", plant=_commit_removed),
        "one-manifest-name": Bug(what="all committers write their manifest under one name", plant=_one_manifest_name),
        "no-own-write-recognition": Bug(
            what="a retry after a lost response does not recognize its own write", plant=_no_own_write_recognition
        ),
        "no-coverage-check": Bug(what="a commit does not prove that every element is stored", plant=_no_coverage_check),
        "receipts-list-only-stored": Bug(
            what="a receipt does not list what its rank holds and others should store", plant=_receipts_list_only_stored
        ),
        "late-references": Bug(
            what="what a save refers to is marked after its commit, not before its data", plant=_late_references
        ),
        "no-slot-recheck": Bug(
            what="nobody looks whether a state was staged over while it was written", plant=_no_slot_recheck
        ),
        "trusted-list": Bug(what="what a listing does not show is not there", plant=_trusted_list),
        "unmarked-reader": Bug(what="a reader leaves no mark for those who delete", plant=_unmarked_reader),
    }
)
"""The bugs, by name."""
