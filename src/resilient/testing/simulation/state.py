"""What the simulated ranks hold: a few bytes each, which nobody else has at any other step of any other life."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from resilient.catalog.commit import write_receipt
from resilient.catalog.references import refer
from resilient.format import values
from resilient.format.chunks import NOT_HERE, Boxes, Chunks, Places
from resilient.format.digest import digest
from resilient.format.documents import Item, Object, Receipt, Tensor, Value
from resilient.format.layout import Attempt
from resilient.store.base import Store

_ITEMS = (Item("model", "mapping"),)
_NBYTES = 8
_FROZEN = 4
"""So many ranks hold a part that never changes, and refer to it once it is stored."""


class Sick(StrEnum):
    """What is wrong with a state, so that it must never be committed."""

    HOLE = "a part that no rank stores"
    DIVERGENT = "a plain tensor that differs between ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank has stored of an attempt: objects by key, the digests of all its chunks, and its receipt."""

    objects: dict[str, bytes]
    digests: frozenset[bytes]
    receipt: Receipt


@dataclass(slots=True, kw_only=True)
class State:
    """The state of one rank: a row of ``w``, a replica of ``b``, a row of ``frozen`` on the first few ranks.

    ``history`` names the life that trains: what it saves as a step is not what another one saves as that step.
    """

    rank: int
    world_size: int
    history: str
    _base: tuple[Attempt, Object] | None = field(default=None, init=False)
    _full: dict[Attempt, Object] = field(default_factory=dict, init=False)

    def committed(self, attempt: Attempt) -> None:
        """Let later saves refer to what this one has stored."""
        if attempt in self._full:
            self._base = attempt, self._full.pop(attempt)
            self._full.clear()

    def part(self, store: Store, attempt: Attempt, sick: Sick | None) -> Part:
        """Return what this rank stores of an attempt, having asked whether it may refer to what it has stored."""
        rank, rows = self.rank, [0, 1]
        victim = self.world_size - 1
        own = self._bytes(f"w {attempt.step} {rank}")
        shared = self._bytes(f"b {attempt.step}" + (" drifted" if sick is Sick.DIVERGENT and rank == victim else ""))
        mine = own + (shared if rank == 0 else b"")
        hole = sick is Sick.HOLE and rank == victim
        objects: dict[str, bytes] = {} if hole else {attempt.data(rank, 0): mine}
        named = [Object(key, len(data)) for key, data in objects.items()]
        content = [own, shared]
        where = [NOT_HERE if hole else 0, 0 if rank == 0 and not hole else NOT_HERE]
        if rank < _FROZEN:
            rows.append(2)
            content.append(self._frozen())
            where.append(len(named))
            named.append(self._placed(store, attempt, objects))
        found = [digest(one) for one in content]
        receipt = Receipt(
            step=attempt.step,
            generation=attempt.generation,
            nonce=attempt.nonce,
            rank=rank,
            world_size=self.world_size,
            items=_ITEMS,
            tensors=self._tensors()[: len(rows)],
            objects=tuple(named),
            chunks=Chunks(self._boxes(rows), _places(where, found)),
            values=(Value("model", "step", ("step",), values.encode(attempt.step)),),
        )
        return Part(objects=objects, digests=frozenset(found), receipt=receipt)

    def write(self, store: Store, part: Part) -> None:
        """Store a part, as a writer does: its data, then its receipt."""
        for key, data in part.objects.items():
            store.put(key, [data])
        write_receipt(store, part.receipt)

    def _placed(self, store: Store, attempt: Attempt, objects: dict[str, bytes]) -> Object:
        """Return the object that holds the part that never changes; a new one, unless an earlier one may be named."""
        if self._base is not None and refer(store, self._base[0], attempt):
            return self._base[1]
        self._base = None
        fresh = Object(attempt.data(self.rank, 1), _NBYTES)
        objects[fresh.key] = self._frozen()
        self._full[attempt] = fresh
        return fresh

    def _frozen(self) -> bytes:
        return digest(f"frozen {self.rank}".encode())[:_NBYTES]

    def _bytes(self, what: str) -> bytes:
        return digest(f"{self.history} {what}".encode())[:_NBYTES]

    def _tensors(self) -> tuple[Tensor, ...]:
        return (
            Tensor("model", "w", ("w",), "int64", (self.world_size,)),
            Tensor("model", "b", ("b",), "int64", (1,)),
            Tensor("model", "frozen", ("frozen",), "int64", (min(_FROZEN, self.world_size),)),
        )

    def _boxes(self, rows: Sequence[int]) -> Boxes:
        offset = np.array([[self.rank], [0], [self.rank]][: len(rows)], np.int64)
        return Boxes(
            tensor=np.array(rows, np.int32),
            ndim=np.ones(len(rows), np.uint8),
            offset=offset,
            size=np.ones((len(rows), 1), np.int64),
        )


def _places(where: Sequence[int], digests: Sequence[bytes]) -> Places:
    rows = len(where)
    start = np.zeros(rows, np.int64)
    if where[1] != NOT_HERE:
        start[1] = _NBYTES  # behind the row of ``w``, in one object
    return Places(
        object=np.array(where, np.int32),
        start=start,
        nbytes=np.full(rows, _NBYTES, np.int64),
        codec=np.zeros(rows, np.uint8),
        digest=np.frombuffer(b"".join(digests), np.uint8).reshape(rows, -1),
        digested=np.ones(rows, bool),
    )
