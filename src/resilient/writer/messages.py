"""What a trainer and its writer say to each other: typed, as MessagePack, never executable."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec

from resilient import errors
from resilient.errors import ErrorKind, ResilientError, StoreError
from resilient.format.documents import Item, Tensor, Value
from resilient.policy.keep import Keep

MEMORY: Final = "memory"
"""The tier that is the host's memory."""


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """A place of this node that holds the newest states beside the store.

    ``name`` is what people read: ``memory``, or the directory that they gave. ``path`` is the directory there that is
    this node's and this run's own.
    """

    name: str
    path: str

    @property
    def volatile(self) -> bool:
        """Whether it is memory."""
        return self.name == MEMORY


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where the writer of another node takes copies, and the word that shows that they are from this job."""

    host: str
    port: int
    token: str


class Open(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The first word: where to write, as whom, and how."""

    url: str
    options: dict[str, Any]  # for `open_store`; plain values
    run_id: str  # by which a later life of the run finds this writer
    rank: int
    world_size: int
    generation: int
    nonce: str
    commit_timeout_s: float
    keep: Keep | None = None  # what retention leaves (rank 0 applies it); None deletes nothing
    compress: str = "auto"
    max_bandwidth: float | None = None  # bytes per second to the store
    tiers: tuple[Tier, ...] = ()  # of this node, nearest first
    copies: bool = False  # to and from another node


class Structure(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What is the same in all saves until the state changes its shape: what this rank holds, and where it is staged.

    A piece is a chunk-to-be. The columns are little-endian int64, one entry per piece (``offset`` and ``size``: one per
    dimension of its tensor): ``tensor`` indexes ``tensors``; ``object`` is the part number of the data object that this
    rank stores it in, or `NOT_HERE`; ``start`` is its place there; ``at`` is its place in the slot's payload, or -1 if
    it is not staged. Each of ``objects`` is one range of the payload, ``(at, nbytes)``, page-aligned.
    """

    number: int
    items: tuple[Item, ...]
    tensors: tuple[Tensor, ...]
    objects: tuple[tuple[int, int], ...]
    tensor: bytes
    object: bytes
    start: bytes
    nbytes: bytes
    at: bytes
    offset: bytes
    size: bytes


class Save(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A state is staged: make it durable and commit it. ``sequence`` is what the slot's stamp says.

    ``trained``: which tensors of the structure should have changed since the save before. ``stores`` and ``tiers``:
    whether the state goes to the store, and to the tiers of the node. ``complete``: the newest step that all ranks have
    in their tiers; what is older there may go. ``copy_to``: the node that gets a copy of what goes to the tiers.
    """

    structure: int
    slot: int
    sequence: int
    step: int
    reason: str
    values: tuple[Value, ...]
    metrics: dict[str, float] = {}
    trained: tuple[int, ...] = ()
    stores: bool = True
    tiers: bool = False
    complete: int | None = None
    copy_to: Address | None = None


class Abandon(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Another rank's part of this step will not come: stop waiting for it."""

    step: int
    why: str


class Close(msgspec.Struct, tag=True, frozen=True):
    """Finish what was ordered, then end."""


Order: TypeAlias = Open | Structure | Save | Abandon | Close


class Ready(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The writer has opened the store and mapped the slots; at ``port`` it takes copies, with that word."""

    pid: int
    port: int = 0
    token: str = ""


class Taken(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """From now on this save is completed whatever happens to the trainer."""

    step: int


class Persisted(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """This rank's bytes and its receipt are durable, and its slot is free.

    ``nbytes``: of the state; ``sent``: of them to the store, after references and compression. ``cpu_s`` is the
    writer's, since the save was ordered. ``changed``: whether what this rank stores of the ``trained`` tensors differs
    from the save before; None: there is nothing to compare.
    """

    step: int
    slot: int
    nbytes: int
    sent: int
    cpu_s: float
    changed: bool | None = None


class Committed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    step: int
    nbytes: int


class Failed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A save will not be committed by this rank; its slot is free. ``persisted``: its own part had been durable."""

    step: int
    slot: int
    persisted: bool
    error: Fault


class Pruned(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    steps: tuple[int, ...]


class Tiered(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What became of a state in the tiers of the node, which need the slot no longer.

    ``written``: the names of those that hold it now; ``faults`` says what is wrong with the others.
    """

    step: int
    slot: int
    nbytes: int
    cpu_s: float
    written: tuple[str, ...]
    faults: tuple[str, ...] = ()


class Copied(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What became of the copy on another node; ``fault``: why there is none."""

    step: int
    nbytes: int
    duration_s: float
    fault: str = ""


class Noticed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Something that a person should know."""

    message: str


class Died(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Said by the trainer's own side: the writer is gone, with all that was ordered and not answered."""

    why: str


Answer: TypeAlias = Ready | Taken | Persisted | Committed | Failed | Pruned | Tiered | Copied | Noticed | Died


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """An error of this package's tree, on its way to another process."""

    name: str
    message: str
    kind: str
    hint: str | None = None
    rank: int | None = None
    retryable: bool = False

    @classmethod
    def of(cls, error: ResilientError) -> Fault:
        return cls(
            name=type(error).__name__,
            message=str(error),
            kind=str(error.kind),
            hint=error.hint,
            rank=error.rank,
            retryable=isinstance(error, StoreError) and error.retryable,
        )

    def error(self) -> ResilientError:
        """Return the error, to be raised here."""
        cls: type[ResilientError] = getattr(errors, self.name) if self.name in errors.__all__ else ResilientError
        kind = ErrorKind(self.kind)
        if cls is StoreError:
            return StoreError(self.message, kind=kind, hint=self.hint, rank=self.rank, retryable=self.retryable)
        return cls(self.message, kind=kind, hint=self.hint, rank=self.rank)
