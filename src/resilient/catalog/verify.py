"""Whether what is stored is what was written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from resilient.catalog.contents import read_manifest
from resilient.catalog.fetch import decoded, writer_of
from resilient.catalog.generations import claimed_numbers
from resilient.catalog.line import Line, is_given_up
from resilient.catalog.once import read_document, read_or_none
from resilient.catalog.parallel import each
from resilient.catalog.tombstones import continuation
from resilient.errors import CorruptError, NotFoundError
from resilient.format import layout
from resilient.format.chunks import NOT_HERE, Chunk
from resilient.format.digest import digest
from resilient.format.documents import (
    Base,
    Claim,
    Commit,
    Manifest,
    Newest,
    Object,
    Receipt,
    ReceiptRef,
    RunInfo,
    Tensor,
    Tombstone,
)
from resilient.format.frame import unseal_json
from resilient.format.receipts import decode_receipt
from resilient.store.base import Store

D = TypeVar("D", RunInfo, Claim, Base, Commit, Tombstone, Newest)
Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """One thing that is not as it was written; ``step`` is None for what belongs to the run as a whole."""

    step: int | None
    object: str
    tensor: str | None = None
    rank: int | None = None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was found; ``checked`` counts the objects that were looked at."""

    checked: int
    bad: tuple[Bad, ...]

    @property
    def ok(self) -> bool:
        """Whether everything is as it was written."""
        return not self.bad


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A chunk, wherever it is listed."""

    key: str
    chunk: Chunk
    tensor: Tensor
    rank: int | None


def verify(
    store: Store,
    commits: Sequence[Commit],
    *,
    deep: bool,
    progress: Progress | None = None,
    line: Line | None = None,
) -> Verification:
    """Compare checkpoints with their digests. What is damaged is listed, never raised.

    Checks each COMMIT, manifest and receipt, and the size of each data object; with ``deep`` also every stored byte.
    A COMMIT that was removed makes its attempt one that was never committed: nobody can tell.

    Args:
        store: the run.
        commits: which checkpoints.
        deep: read the data.
        progress: called with the bytes read so far and all bytes to read, if ``deep``; from any thread, one at a time.
        line: given if the run as a whole is meant: checks ``run.json``, claims, bases and damaged COMMITs too.
    """
    bad: list[Bad] = []
    checked = 0
    if line is not None:
        checked, found = _check_run(store, line)
        bad.extend(found)
    read = _Reader(store, sum(commit.nbytes for commit in commits), progress)
    for commit in commits:
        count, found = _check_commit(store, commit, read if deep else None)
        # It may have been deleted, as retention does, while we looked.
        if not found or not is_given_up(store, commit.attempt):
            checked += count
            bad.extend(found)
    return Verification(checked=checked, bad=tuple(bad))


def verify_data(store: Store, manifest: Manifest, *, progress: Progress | None = None) -> tuple[Bad, ...]:
    """Compare every stored byte that a manifest names with its digest; what is damaged is listed, never raised."""
    read = _Reader(store, sum(chunk.nbytes for chunk in manifest.chunks), progress)
    wrong = [found for found in each(lambda one: _check_size(store, manifest, one), manifest.objects) if found]
    return (*wrong, *_check_data(manifest, (), wrong, read))


def _check_run(store: Store, line: Line) -> tuple[int, list[Bad]]:
    """Check what belongs to no single step, and say which steps were committed and cannot be read any more."""
    bad = [
        Bad(step=attempt.step, object=attempt.commit, why="is torn or not what was written") for attempt in line.torn
    ]
    _, why = _read(store, RunInfo, layout.RUN, needed=True)
    if why:
        bad.append(Bad(step=None, object=layout.RUN, why=why))
    numbers = sorted({*line.chain.links, *claimed_numbers(store)})
    checked = 1 + len(line.torn)
    for count, found in each(lambda number: _check_generation(store, line, number), numbers):
        checked += count
        bad.extend(found)
    return checked, bad


def _check_generation(store: Store, line: Line, number: int) -> tuple[int, list[Bad]]:
    """Return how many documents of a generation were looked at, and what is wrong with them."""
    link = line.chain.links.get(number)
    claim, claim_why = _read(store, Claim, layout.claim(number), needed=link is not None)
    base, base_why = _read(store, Base, layout.base(number), needed=link is not None)
    if link is not None and claim is not None and claim.nonce != link.nonce:
        claim_why = f"is the claim of another generation {number}"
    if link is not None and base is not None and base.nonce != link.nonce:
        base_why = f"is the base of another generation {number}"
    found = [(layout.claim(number), claim_why), (layout.base(number), base_why)]
    # Of these, generations of earlier versions of this library have none.
    hint, hint_why = _read(store, Newest, layout.newest(number), needed=False)
    if hint is not None or hint_why:
        found.append((layout.newest(number), hint_why))
    if base is not None and base.attempt is not None:
        mark = continuation(base.attempt, number)
        if (data := read_or_none(store, mark)) is not None:
            found.append((mark, _damage(data, mark)))
    return len(found), [Bad(step=None, object=key, why=why) for key, why in found if why]


def _damage(sealed: bytes, key: str) -> str:
    try:
        unseal_json(sealed, key)
    except CorruptError as error:
        return _without(key, error)
    return ""


def _read(store: Store, kind: type[D], key: str, *, needed: bool) -> tuple[D | None, str]:
    """Return a document, and what is wrong with it."""
    try:
        document = read_document(store, kind, key)
    except CorruptError as error:
        return None, _without(key, error)
    return document, "is missing" if document is None and needed else ""


def _check_commit(store: Store, commit: Commit, read: _Reader | None) -> tuple[int, list[Bad]]:
    """Return how many objects of a checkpoint were looked at, and what is wrong with them."""
    attempt = commit.attempt
    bad: list[Bad] = []
    document, why = _read(store, Commit, attempt.commit, needed=True)
    if why or document != commit:
        bad.append(Bad(step=commit.step, object=attempt.commit, why=why or "has changed"))
    try:
        manifest = read_manifest(store, commit)
    except CorruptError as error:
        key = attempt.manifest(commit.manifest)
        bad.append(Bad(step=commit.step, object=key, why=_without(key, error)))
        return 2, bad
    receipts: list[Receipt] = []
    for outcome in each(lambda ref: _check_receipt(store, commit, ref), manifest.receipts):
        if isinstance(outcome, Bad):
            bad.append(outcome)
        else:
            receipts.append(outcome)
    wrong = [found for found in each(lambda one: _check_size(store, manifest, one), manifest.objects) if found]
    bad.extend(wrong)
    if read is not None:
        bad.extend(_check_data(manifest, receipts, wrong, read))
    return 2 + len(manifest.receipts) + len(manifest.objects), bad


def _check_data(manifest: Manifest, receipts: Sequence[Receipt], wrong: Sequence[Bad], read: _Reader) -> list[Bad]:
    """Compare all chunks but those of objects that are known to be wrong."""
    damaged = {found.object for found in wrong}
    chunks = [chunk for chunk in _stored(manifest, receipts) if chunk.key not in damaged]
    return [found for found in each(lambda chunk: read.check(manifest.step, chunk), chunks) if found]


def _check_receipt(store: Store, commit: Commit, ref: ReceiptRef) -> Receipt | Bad:
    key = commit.attempt.receipt(ref.rank)
    data = read_or_none(store, key)
    if data is None:
        return Bad(step=commit.step, object=key, rank=ref.rank, why="is missing")
    if digest(data) != ref.digest:
        return Bad(step=commit.step, object=key, rank=ref.rank, why="is not what was written: its digest differs")
    return decode_receipt(data, key)


def _check_size(store: Store, manifest: Manifest, one: Object) -> Bad | None:
    try:
        nbytes = store.size(one.key)
    except NotFoundError:
        why = "is missing"
    else:
        if nbytes == one.nbytes:
            return None
        why = f"has {nbytes} bytes instead of {one.nbytes}"
    # By its first chunk: whose object it is, and one of the tensors that are lost with it.
    number = manifest.objects.index(one)
    chunk = next((chunk for chunk in manifest.chunks if chunk.object == number), None)
    tensor = None if chunk is None else manifest.tensors[chunk.tensor]
    return Bad(
        step=manifest.step,
        object=one.key,
        tensor=None if tensor is None else f"{tensor.item}.{tensor.name}",
        rank=None if chunk is None else writer_of(manifest, chunk),
        why=why,
    )


def _stored(manifest: Manifest, receipts: Sequence[Receipt]) -> Iterator[_Stored]:
    """Yield every stored chunk once: those of the manifest, and copies of them that only receipts list."""
    seen: set[tuple[str, int]] = set()
    writers: dict[int, int | None] = {}
    for chunk in manifest.chunks:
        key = manifest.objects[chunk.object].key
        if chunk.object not in writers:
            writers[chunk.object] = writer_of(manifest, chunk)
        seen.add((key, chunk.start))
        yield _Stored(key=key, chunk=chunk, tensor=manifest.tensors[chunk.tensor], rank=writers[chunk.object])
    for receipt in receipts:
        for chunk in receipt.chunks:
            if chunk.object == NOT_HERE or not chunk.nbytes:
                continue
            key = receipt.objects[chunk.object].key
            # A copy in an earlier attempt that this one does not need is that one's.
            if (key, chunk.start) not in seen and layout.parse_data(key) == receipt.attempt:
                yield _Stored(key=key, chunk=chunk, tensor=receipt.tensors[chunk.tensor], rank=receipt.rank)


class _Reader:
    """Reads chunks and compares them, counting the bytes for whoever watches."""

    def __init__(self, store: Store, total: int, progress: Progress | None) -> None:
        self._store = store
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def check(self, step: int, stored: _Stored) -> Bad | None:
        chunk = stored.chunk
        data = memoryview(bytearray(chunk.nbytes))
        why = ""
        try:
            self._store.read_into(stored.key, chunk.start, data)
        except (NotFoundError, CorruptError):
            why = "is missing or too short"
        else:
            try:
                decoded(stored.tensor, chunk, data)
            except CorruptError as error:
                why = str(error)
        self._advance(chunk.nbytes)
        tensor = f"{stored.tensor.item}.{stored.tensor.name}"
        return Bad(step=step, object=stored.key, tensor=tensor, rank=stored.rank, why=why) if why else None

    def _advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)


def _without(key: str, error: CorruptError) -> str:
    """Return what an error says of an object, without the name that stands beside it already."""
    return str(error).removeprefix(key).strip()
