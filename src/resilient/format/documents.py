"""What the documents of a checkpoint say: receipts, manifests, COMMIT, claims, bases, hints, outcomes.

How receipts and manifests are stored is in `receipts` and `manifests`. The others are sealed JSON, for people.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from resilient.errors import CorruptError, ErrorKind
from resilient.format.chunks import Boxes, Chunks
from resilient.format.frame import seal_json, unseal_json
from resilient.format.layout import Attempt, parse_data

Key: TypeAlias = str | int | tuple[bytes]
"""One step of a path into an item: a string key, an index into a list (>= 0) or a tuple (-1 - index), or any other
dictionary key as an encoded value, alone in an array."""


class Item(msgspec.Struct, array_like=True, frozen=True):
    """A named part of the state. ``derived``: a rank that has none may make its own by rule (random state)."""

    name: str
    kind: str  # "module", "optimizer", "stateful", "mapping"
    per_rank: bool = False
    derived: bool = False


class Tensor(msgspec.Struct, array_like=True, frozen=True):
    """A named global tensor. ``rank`` is set for a tensor of a per-rank item: each rank has its own."""

    item: str
    name: str
    path: tuple[Key, ...]
    dtype: str
    shape: tuple[int, ...]
    rank: int | None = None
    alias: str | None = None  # the name that holds the bytes, where two names share one storage (tied weights)


class Object(msgspec.Struct, array_like=True, frozen=True):
    """A stored object that holds chunks back to back: every byte of it belongs to one chunk."""

    key: str
    nbytes: int


class Value(msgspec.Struct, array_like=True, frozen=True):
    """A leaf that is no tensor; ``data`` is what `values.encode` made of it."""

    item: str
    name: str
    path: tuple[Key, ...]
    data: bytes
    rank: int | None = None


class Receipt(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What one rank holds of a step, replicas included, and what of that it stored where."""

    step: int
    generation: int
    nonce: str
    rank: int
    world_size: int
    items: tuple[Item, ...]
    tensors: tuple[Tensor, ...]
    objects: tuple[Object, ...]
    chunks: Chunks
    values: tuple[Value, ...]

    @property
    def attempt(self) -> Attempt:
        return Attempt(step=self.step, generation=self.generation, nonce=self.nonce)


class ReceiptRef(msgspec.Struct, array_like=True, frozen=True):
    """Which receipt went into a manifest."""

    rank: int
    digest: bytes


class Manifest(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Every byte of a checkpoint, by name: the receipts of all ranks, merged and proven complete."""

    step: int
    generation: int
    nonce: str
    world_size: int
    items: tuple[Item, ...]
    tensors: tuple[Tensor, ...]
    objects: tuple[Object, ...]
    chunks: Chunks
    values: tuple[Value, ...]
    receipts: tuple[ReceiptRef, ...]

    @property
    def attempt(self) -> Attempt:
        return Attempt(step=self.step, generation=self.generation, nonce=self.nonce)

    @property
    def nbytes(self) -> int:
        """Stored bytes: of its own data objects, and of those chunks that lie in objects of earlier attempts."""
        own = np.array([parse_data(each.key) == self.attempt for each in self.objects], bool)
        places = self.chunks.places
        referred = places.nbytes[~own[places.object]].sum()
        return sum(each.nbytes for each, mine in zip(self.objects, own, strict=True) if mine) + int(referred)

    def overlapping(self, wanted: Boxes) -> Chunks:
        """Return the chunks that share an element with any of these boxes, each once."""
        return self.chunks.overlapping(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """``run.json``: what this place is; written once."""

    run_id: str
    created: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Who started a generation: ``nonce`` names its attempts, ``launch`` the start of the job it belongs to."""

    generation: int
    nonce: str
    launch: str
    world_size: int
    host: str
    pid: int
    process_started: str  # tells a reused process id from the process that claimed
    created: str
    versions: dict[str, str]
    heartbeat: bool = False  # whether this launch writes one: a bare save does not, and nobody waits for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Where a generation continues from: nothing (``step`` is None), or an attempt and its manifest digest."""

    generation: int
    nonce: str
    step: int | None = None
    base_generation: int | None = None
    base_nonce: str | None = None
    manifest: str | None = None

    @property
    def attempt(self) -> Attempt | None:
        if self.step is None or self.base_generation is None or self.base_nonce is None:
            return None
        return Attempt(step=self.step, generation=self.base_generation, nonce=self.base_nonce)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """``COMMIT``: exists if and only if the attempt is committed.

    ``manifest`` is the digest of the last ``index_nbytes`` bytes of the manifest, which hold the digests of all others;
    of the whole manifest where ``index_nbytes`` is None (the first encoding). ``metrics``: what the program said of how
    good the state is, for retention and for people.
    """

    step: int
    generation: int
    nonce: str
    manifest: str
    manifest_nbytes: int
    nbytes: int
    world_size: int
    items: tuple[str, ...]
    created: str
    reason: str
    committer: int
    index_nbytes: int | None = None
    metrics: dict[str, float] = field(default_factory=dict, hash=False)

    @property
    def attempt(self) -> Attempt:
        return Attempt(step=self.step, generation=self.generation, nonce=self.nonce)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """``TOMBSTONE``: this attempt never counts again, for whatever line it was decided on.

    ``head`` is the newest generation of that line: one that continued from the attempt later does without it. None: it
    holds for ever, for every line.
    """

    step: int
    generation: int
    nonce: str
    created: str
    reason: str
    head: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """The newest steps that a generation has committed, or is about to: a hint, for those whose listing is stale."""

    generation: int
    nonce: str
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """By which failure a generation ended, as the first rank that failed has seen it.

    ``message`` has no numbers and addresses any more, so that it is the same each time. ``cause`` says what may be to
    blame: "code", "numeric", "environment"; "verdict" if the generation was refused because of those before it.
    ``program`` names the source of the training function. ``step`` steps were complete; ``restored_...`` is what it
    had restored, or was just restoring. ``leave_out``: the samples of the step that failed, which the next life is not
    to use: the epoch and the position in its order, by the name of the sampler.
    """

    generation: int
    nonce: str
    launch: str
    rank: int
    error: str
    message: str
    cause: str
    program: str
    step: int
    created: str
    restored_step: int | None = None
    restored_generation: int | None = None
    restored_nonce: str | None = None
    leave_out: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def restored(self) -> Attempt | None:
        if self.restored_step is None or self.restored_generation is None or self.restored_nonce is None:
            return None
        return Attempt(step=self.restored_step, generation=self.restored_generation, nonce=self.restored_nonce)


Document: TypeAlias = RunInfo | Claim | Base | Commit | Tombstone | Newest | Outcome
_NAMES: Final[dict[type, str]] = {
    RunInfo: "run",
    Claim: "claim",
    Base: "base",
    Commit: "commit",
    Tombstone: "tombstone",
    Newest: "newest",
    Outcome: "outcome",
}


def encode_document(document: Document) -> bytes:
    """Return a document as sealed JSON."""
    return seal_json({"kind": _NAMES[type(document)], **asdict(document)})


def decode_document(kind: type[Any], data: bytes, where: str) -> Any:
    """Return a document of this kind, or raise `CorruptError` naming ``where``."""
    members = unseal_json(data, where)
    members.pop("format")
    if members.pop("kind", None) != _NAMES[kind]:
        raise CorruptError(f"{where} is not a {_NAMES[kind]}", kind=ErrorKind.MALFORMED)
    try:
        return msgspec.convert(members, kind)
    except msgspec.ValidationError as error:
        raise CorruptError(f"{where} does not decode: {error}", kind=ErrorKind.MALFORMED) from error
