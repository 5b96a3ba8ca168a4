"""How an attempt becomes a checkpoint: receipts, one manifest, one COMMIT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from resilient.catalog.hints import propose
from resilient.catalog.merge import Merge
from resilient.catalog.once import again_if_corrupt, create_once, exists, read_document, read_or_none
from resilient.catalog.parallel import each, in_order
from resilient.catalog.references import check_references
from resilient.clock import Clock, rfc3339
from resilient.errors import ConflictError, CorruptError, ErrorKind
from resilient.format.digest import digest
from resilient.format.documents import Commit, Manifest, Receipt, encode_document
from resilient.format.layout import Attempt
from resilient.format.manifests import encode_manifest
from resilient.format.receipts import encode_receipt
from resilient.store.base import Store

_UNLISTED: Final = 64
"""Receipts that are looked for under their names at once, without asking for a listing first."""
_READERS: Final = 128
"""Receipts that are read at once, from a store whose calls wait: 32,768 round trips of 50 ms are half an hour."""


def write_receipt(store: Store, receipt: Receipt) -> None:
    """Store what one rank holds and what it stored; all data it names must be durable before this is called.

    Raises:
        ConflictError: this rank has written another receipt for this attempt; receipts never change, for a manifest
            may name them.
    """
    key = receipt.attempt.receipt(receipt.rank)
    if not create_once(store, key, encode_receipt(receipt)):
        raise ConflictError(
            f"{store.url}: rank {receipt.rank} has saved {receipt.attempt} before, with other contents ({key})",
            kind=ErrorKind.ALREADY_SAVED,
            hint="a step is saved once in a generation; save a later step",
            rank=receipt.rank,
        )


def try_commit(
    store: Store,
    attempt: Attempt,
    *,
    world_size: int,
    committer: int,
    reason: str,
    clock: Clock,
    metrics: Mapping[str, float] | None = None,
) -> Commit | tuple[int, ...]:
    """Commit an attempt if every rank's receipt is there; any rank may, and several may at once.

    ``metrics`` are those of whoever commits.

    Returns:
        The one COMMIT of the attempt, whoever wrote it; or the ranks whose receipts are still missing.

    Raises:
        ConflictError: the receipts contradict each other or leave a hole, or the attempt was given up.
        CorruptError: a receipt, or a COMMIT that is there, is not what was written.
    """
    # 1. Somebody may have been quicker.
    committed = read_document(store, Commit, attempt.commit)
    if committed is not None:
        return _own(committed, attempt)
    # 2. Receipts by exact names, and the proof that they cover the state.
    absent = _absent(store, attempt, world_size)
    if absent:
        return absent
    manifest = merged(store, attempt, world_size)
    if not isinstance(manifest, Manifest):
        return manifest
    check_references(store, attempt, (one.key for one in manifest.objects))
    # 3. The manifest, durable before COMMIT names it. Its name is its digest: committers that saw different sets
    # cannot collide.
    content, index_nbytes = encode_manifest(manifest)
    name = digest(memoryview(content)[-index_nbytes:]).hex()
    if not create_once(store, attempt.manifest(name), content):
        raise CorruptError(f"{attempt.manifest(name)} is not what its name says", kind=ErrorKind.BAD_DIGEST)
    # Before COMMIT, and durable: a reader whose listing is stale must find it, whoever dies in between.
    propose(store, attempt)
    if exists(store, attempt.tombstone):
        raise ConflictError(f"{attempt} was given up before it was committed", kind=ErrorKind.SAVE_FAILED)
    # 4. COMMIT: one of all committers wins, and its manifest is the one that counts.
    commit = Commit(
        step=attempt.step,
        generation=attempt.generation,
        nonce=attempt.nonce,
        manifest=name,
        manifest_nbytes=len(content),
        nbytes=manifest.nbytes,
        world_size=world_size,
        items=tuple(item.name for item in manifest.items),
        created=rfc3339(clock.now()),
        reason=reason,
        committer=committer,
        index_nbytes=index_nbytes,
        metrics=dict(metrics or {}),
    )
    if create_once(store, attempt.commit, encode_document(commit)):
        return commit
    committed = read_document(store, Commit, attempt.commit)
    if committed is None:
        raise ConflictError(f"{attempt} was removed while it was being committed", kind=ErrorKind.SAVE_FAILED)
    return _own(committed, attempt)


def read_commit(store: Store, attempt: Attempt) -> Commit | None:
    """Return an attempt's COMMIT; None if there is none, or it does not parse: then the attempt is not committed."""
    try:
        commit = read_document(store, Commit, attempt.commit)
    except CorruptError as error:
        if error.kind is ErrorKind.NEWER_FORMAT:
            raise
        return None
    return commit if commit is not None and commit.attempt == attempt else None


def _own(commit: Commit, attempt: Attempt) -> Commit:
    if commit.attempt != attempt:
        raise CorruptError(f"{attempt.commit} describes {commit.attempt}", kind=ErrorKind.MALFORMED)
    return commit


def _absent(store: Store, attempt: Attempt, world_size: int) -> tuple[int, ...]:
    """Return ranks whose receipts are not there yet; of many that miss, some are only not listed.

    A listing proposes which ones to look for, so that a committer that waits for a large job asks for a few names, not
    for all. It may be stale: a rank counts as missing because its receipt cannot be found under its exact name.
    """
    if world_size <= _UNLISTED:
        return ()
    listed = set(store.list(attempt.receipts))
    doubtful = [rank for rank in range(world_size) if attempt.receipt(rank) not in listed]
    for start in range(0, len(doubtful), _UNLISTED):
        found = each(lambda rank: exists(store, attempt.receipt(rank)), doubtful[start : start + _UNLISTED])
        if not all(found):
            asked = zip(doubtful[start:], [*found, *[False] * len(doubtful)], strict=False)
            return tuple(rank for rank, there in asked if not there)
    return ()


def merged(store: Store, attempt: Attempt, world_size: int) -> Manifest | tuple[int, ...]:
    """Return what the receipts say together; or the ranks whose receipts are missing."""
    merge = Merge(attempt, world_size)
    missing: list[int] = []
    # Threads only wait for the store: were they to unpack too, they would fight for the interpreter.
    found = in_order(lambda rank: read_or_none(store, attempt.receipt(rank)), range(world_size), threads=_READERS)
    for rank, data in enumerate(found):
        if data is None:
            missing.append(rank)
        elif not missing:
            _add(merge, data, store, attempt.receipt(rank))
    return tuple(missing) or merge.manifest()


def _add(merge: Merge, data: bytes, store: Store, key: str) -> None:
    """Take a receipt; read it again if it was damaged on its way, as one of thousands always may be."""
    answers = [data]
    again_if_corrupt(lambda: merge.add(answers.pop() if answers else store.get(key), key))
