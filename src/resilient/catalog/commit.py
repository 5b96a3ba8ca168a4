"""How an attempt becomes a checkpoint: receipts, one manifest, one COMMIT."""

from __future__ import annotations

from resilient.catalog.merge import merge
from resilient.catalog.once import create_once, exists, read_document, read_or_none
from resilient.catalog.parallel import each
from resilient.clock import Clock, rfc3339
from resilient.errors import ConflictError, CorruptError, ErrorKind
from resilient.format.digest import digest
from resilient.format.documents import (
    Commit,
    Manifest,
    Receipt,
    decode_manifest,
    decode_receipt,
    encode_document,
    encode_manifest,
    encode_receipt,
)
from resilient.format.layout import Attempt
from resilient.store.base import Store


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
    store: Store, attempt: Attempt, *, world_size: int, committer: int, reason: str, clock: Clock
) -> Commit | tuple[int, ...]:
    """Commit an attempt if every rank's receipt is there; any rank may, and several may at once.

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
    # 2. Receipts by exact names: a listing may be stale.
    found = each(lambda rank: read_or_none(store, attempt.receipt(rank)), range(world_size))
    missing = tuple(rank for rank, data in enumerate(found) if data is None)
    if missing:
        return missing
    stored = [data for data in found if data is not None]
    # 3. Prove that they cover the state.
    receipts = [decode_receipt(data, attempt.receipt(rank)) for rank, data in enumerate(stored)]
    _check_belong(receipts, attempt, world_size)
    manifest = merge(receipts, [digest(data) for data in stored])
    # 4. The manifest, durable before COMMIT names it. Its name is its digest: committers that saw different sets
    # cannot collide.
    content = encode_manifest(manifest)
    name = digest(content).hex()
    if not create_once(store, attempt.manifest(name), content):
        raise CorruptError(f"{attempt.manifest(name)} is not what its name says", kind=ErrorKind.BAD_DIGEST)
    if exists(store, attempt.tombstone):
        raise ConflictError(f"{attempt} was given up before it was committed", kind=ErrorKind.SAVE_FAILED)
    # 5. COMMIT: one of all committers wins, and its manifest is the one that counts.
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


def read_manifest(store: Store, commit: Commit) -> Manifest:
    """Return the manifest that a COMMIT names.

    Raises:
        CorruptError: it is missing, has another size or digest, or is another attempt's; the object is named.
    """
    key = commit.attempt.manifest(commit.manifest)
    content = read_or_none(store, key)
    if content is None:
        raise CorruptError(f"{key} is missing, though {commit.attempt} is committed", kind=ErrorKind.MALFORMED)
    if len(content) != commit.manifest_nbytes:
        raise CorruptError(
            f"{key} has {len(content)} bytes instead of {commit.manifest_nbytes}", kind=ErrorKind.MALFORMED
        )
    if digest(content).hex() != commit.manifest:
        raise CorruptError(f"{key} is not what was written: its digest differs", kind=ErrorKind.BAD_DIGEST)
    manifest = decode_manifest(content, key)
    if manifest.attempt != commit.attempt:
        raise CorruptError(f"{key} describes {manifest.attempt}", kind=ErrorKind.MALFORMED)
    return manifest


def _own(commit: Commit, attempt: Attempt) -> Commit:
    if commit.attempt != attempt:
        raise CorruptError(f"{attempt.commit} describes {commit.attempt}", kind=ErrorKind.MALFORMED)
    return commit


def _check_belong(receipts: list[Receipt], attempt: Attempt, world_size: int) -> None:
    for rank, receipt in enumerate(receipts):
        if (receipt.attempt, receipt.rank, receipt.world_size) != (attempt, rank, world_size):
            raise ConflictError(
                f"{attempt.receipt(rank)} is of rank {receipt.rank} of {receipt.world_size} for {receipt.attempt}; "
                f"rank {rank} of {world_size} for {attempt} is wanted",
                kind=ErrorKind.DIVERGENT,
                hint="all ranks of a job must save with the same world size",
                rank=rank,
            )
