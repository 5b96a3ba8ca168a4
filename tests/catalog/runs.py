"""Small runs made by hand: receipts, generations and commits, without any training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from resilient.catalog.commit import try_commit, write_receipt
from resilient.catalog.generations import claim_generation, write_base
from resilient.catalog.merge import Merge
from resilient.catalog.run_info import open_run
from resilient.clock import SYSTEM_CLOCK
from resilient.format import layout, values
from resilient.format.box import Box
from resilient.format.chunks import NOT_HERE, Chunk, Chunks
from resilient.format.digest import digest
from resilient.format.documents import (
    Claim,
    Commit,
    Item,
    Manifest,
    Object,
    Receipt,
    Tensor,
    Value,
    encode_document,
)
from resilient.format.layout import Attempt
from resilient.format.receipts import encode_receipt
from resilient.store.base import Store

Array = npt.NDArray[Any]


class HandClock:
    """A clock that moves when somebody sleeps, and tells ``woken`` each time."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self.slept: list[float] = []

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.elapsed_s)

    def monotonic(self) -> float:
        return self.elapsed_s

    def sleep(self, duration_s: float) -> None:
        self.slept.append(duration_s)
        self.elapsed_s += duration_s


class ReceiptMaker:
    """Makes the receipt of one rank; the data of what it stores lies in one object."""

    def __init__(self, attempt: Attempt, rank: int = 0, world_size: int = 1) -> None:
        self.attempt = attempt
        self.rank = rank
        self.world_size = world_size
        self.items: dict[str, Item] = {}
        self.tensors: dict[tuple[str, str, int | None], Tensor] = {}
        self.chunks: list[Chunk] = []
        self.values: list[Value] = []
        self.data: list[bytes] = []

    def item(self, name: str, *, per_rank: bool = False, derived: bool = False) -> ReceiptMaker:
        self.items[name] = Item(name, "mapping", per_rank, derived)
        return self

    def tensor(
        self,
        name: str,
        full: Array,
        box: Box | None = None,
        *,
        item: str = "model",
        store: bool = True,
        known: bool = True,
    ) -> ReceiptMaker:
        """Hold a box of a tensor: store it, or only list it, with its digest if ``known``."""
        number = self._tensor(item, name, str(full.dtype), full.shape, None)
        box = box or Box.whole(full.shape)
        data = np.ascontiguousarray(full[box.relative_to(Box.whole(full.shape))]).tobytes()
        start = sum(map(len, self.data))
        found = digest(data) if store or known else b""
        here, at = (0, start) if store else (NOT_HERE, 0)
        if box.volume:
            self.chunks.append(Chunk(number, box.offset, box.size, here, at, len(data), found))
            if store:
                self.data.append(data)
        return self

    def alias(self, name: str, full: Array, target: str, *, item: str = "model") -> ReceiptMaker:
        self._tensor(item, name, str(full.dtype), full.shape, target)
        return self

    def value(self, name: str, value: object, *, item: str = "model") -> ReceiptMaker:
        known = self._item(item)
        self.values.append(Value(item, name, (name,), values.encode(value), self.rank if known.per_rank else None))
        return self

    def _item(self, name: str) -> Item:
        return self.items.setdefault(name, Item(name, "mapping"))

    def _tensor(self, item: str, name: str, dtype: str, shape: Sequence[int], alias: str | None) -> int:
        rank = self.rank if self._item(item).per_rank else None
        key = (item, name, rank)
        self.tensors.setdefault(key, Tensor(item, name, (name,), dtype, tuple(shape), rank, alias))
        return list(self.tensors).index(key)

    def receipt(self) -> Receipt:
        content = b"".join(self.data)
        return Receipt(
            step=self.attempt.step,
            generation=self.attempt.generation,
            nonce=self.attempt.nonce,
            rank=self.rank,
            world_size=self.world_size,
            items=tuple(self.items.values()),
            tensors=tuple(self.tensors.values()),
            objects=(Object(self.attempt.data(self.rank, 0), len(content)),) if content else (),
            chunks=Chunks.of(self.chunks),
            values=tuple(self.values),
        )

    def write(self, store: Store) -> Receipt:
        if self.data:
            store.put(self.attempt.data(self.rank, 0), self.data)
        receipt = self.receipt()
        write_receipt(store, receipt)
        return receipt


def merge(receipts: Sequence[Receipt]) -> Manifest:
    """Merge receipts as a committer does that has read them."""
    merging = Merge(receipts[0].attempt, receipts[0].world_size)
    for receipt in receipts:
        merging.add(encode_receipt(receipt), "it")
    return merging.manifest()


def attempt_of(claim: Claim, step: int) -> Attempt:
    return Attempt(step=step, generation=claim.generation, nonce=claim.nonce)


def new_generation(
    store: Store, continues: Commit | None = None, *, launch: str = "a", heartbeat: bool = False
) -> Claim:
    open_run(store, create=True, clock=SYSTEM_CLOCK)
    claim = claim_generation(store, world_size=1, launch=launch, heartbeat=heartbeat)
    write_base(store, claim, continues)
    return claim


def dead_generation(store: Store, continues: Commit | None = None, *, world_size: int = 2) -> Claim:
    """Start a generation whose process has ended."""
    made = new_generation(store, continues)
    members = {name: getattr(made, name) for name in made.__slots__}
    dead = Claim(**members | {"pid": 2**22 + 1, "world_size": world_size})
    store.put(layout.claim(made.generation), [encode_document(dead)])
    return dead


def tensors_of(step: int) -> Mapping[str, Array]:
    """Return the state that `save` stores as a step."""
    return {"w": np.arange(24, dtype=np.float32).reshape(6, 4) + step, "b": np.full(3, step, dtype=np.int64)}


def save(store: Store, claim: Claim, step: int, *, world_size: int = 2, commit: bool = True) -> Attempt:
    """Save a step as ranks do: a tensor in row blocks, a replica, a per-rank item with a value, and a derived one."""
    attempt = attempt_of(claim, step)
    full = tensors_of(step)
    ends = [6 * rank // world_size for rank in range(world_size + 1)]
    for rank in range(world_size):
        maker = ReceiptMaker(attempt, rank, world_size).item("rng", per_rank=True, derived=True)
        box = Box((ends[rank], 0), (ends[rank + 1] - ends[rank], 4))
        maker.tensor("w", full["w"], box).tensor("b", full["b"], store=rank == 0)
        maker.alias("tied", full["b"], "b").value("step", step)
        maker.tensor("state", np.full(2, 10 * step + rank, dtype=np.int64), item="rng").write(store)
    if commit:
        outcome = commit_of(store, attempt, world_size=world_size)
        assert isinstance(outcome, Commit), outcome
    return attempt


def commit_of(
    store: Store,
    attempt: Attempt,
    *,
    world_size: int = 2,
    committer: int = 0,
    metrics: Mapping[str, float] | None = None,
) -> Commit | tuple[int, ...]:
    return try_commit(
        store,
        attempt,
        world_size=world_size,
        committer=committer,
        reason="test",
        clock=SYSTEM_CLOCK,
        metrics=metrics,
    )
