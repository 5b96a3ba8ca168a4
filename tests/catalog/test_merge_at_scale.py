"""The merge that works on columns says what one says that looks at every chunk by itself, whatever the receipts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.catalog import merge as merging
from resilient.errors import ConflictError, CorruptError
from resilient.format.box import Box
from resilient.format.chunks import Boxes, Chunk, Chunks
from resilient.format.documents import Manifest, Receipt
from resilient.format.layout import Attempt
from resilient.format.receipts import pack_receipt, seal_receipt
from resilient.format.tiling import unseparated
from tests.catalog import merge_by_rows
from tests.catalog.runs import ReceiptMaker, merge

ATTEMPT = Attempt(step=7, generation=3, nonce="00112233aabbccdd")


@dataclass(frozen=True)
class RandomReceipts:
    """Makes the receipts of a few ranks with a few tensors, cut and held in random ways."""

    rng: random.Random
    attempt: Attempt = ATTEMPT

    def receipts(self) -> list[Receipt]:
        world_size = self.rng.randint(1, 5)
        makers = [ReceiptMaker(self.attempt, rank, world_size) for rank in range(world_size)]
        for maker in makers:
            if self.rng.random() < 0.7:
                maker.item("rng", per_rank=True, derived=True).value("seed", maker.rank, item="rng")
                maker.tensor("state", np.full(3, maker.rank), item="rng")
            if self.rng.random() < 0.9:
                maker.value("step", 7)
        for number in range(self.rng.randint(1, 4)):
            self._spread(makers, f"t{number}")
        return [maker.receipt() for maker in makers]

    def _spread(self, makers: list[ReceiptMaker], name: str) -> None:
        shape = tuple(self.rng.randint(0 if self.rng.random() < 0.05 else 1, 7) for _ in range(self.rng.randint(0, 3)))
        full = np.arange(int(np.prod(shape)), dtype=self.rng.choice([np.int16, np.float64])).reshape(shape)
        for box in self.cut(Box.whole(shape), 4):
            holders = self.rng.sample(makers, self.rng.randint(1, len(makers)))
            storing = self.rng.choice(holders)
            for maker in holders:
                store = maker is storing or self.rng.random() < 0.2
                maker.tensor(name, full, box, store=store, known=self.rng.random() < 0.5)
        if self.rng.random() < 0.3:
            self.rng.choice(makers).tensor(name, full, store=False, known=False)
        if self.rng.random() < 0.2:
            self.rng.choice(makers).alias(f"{name} too", full, name)

    def cut(self, box: Box, depth: int) -> list[Box]:
        """Cut a box in two, and both parts again, each along a dimension of its own."""
        axes = [axis for axis, extent in enumerate(box.size) if extent > 1]
        if not axes or not depth or self.rng.random() < 0.25:
            return [box]
        axis = self.rng.choice(axes)
        at = self.rng.randint(1, box.size[axis] - 1)
        low = Box(box.offset, (*box.size[:axis], at, *box.size[axis + 1 :]))
        moved = (*box.offset[:axis], box.offset[axis] + at, *box.offset[axis + 1 :])
        high = Box(moved, (*box.size[:axis], box.size[axis] - at, *box.size[axis + 1 :]))
        return [*self.cut(low, depth - 1), *self.cut(high, depth - 1)]

    def broken(self, receipts: list[Receipt]) -> list[Receipt]:
        """Change one chunk of one receipt, or leave it out, or list another one."""
        rank = self.rng.randrange(len(receipts))
        chunks = list(receipts[rank].chunks)
        if not chunks:
            return receipts
        row = self.rng.randrange(len(chunks))
        chunk = chunks[row]
        change = self.rng.choice(["lose", "digest", "move", "resize", "name", "unstore"])
        if change == "lose":
            del chunks[row]
        elif change == "move" and chunk.offset:
            moved = tuple(max(0, start + self.rng.randint(-1, 1)) for start in chunk.offset)
            chunks[row] = msgspec.structs.replace(chunk, offset=moved)
        elif change == "resize" and chunk.size:
            size = (chunk.size[0] + 1, *chunk.size[1:])
            nbytes = chunk.nbytes // chunk.size[0] * size[0]
            chunks.append(Chunk(chunk.tensor, chunk.offset, size, -1, 0, nbytes, b""))
        elif change == "name":
            chunks[row] = msgspec.structs.replace(chunk, object=chunk.object + self.rng.choice([-3, 1]))
        elif change == "unstore":
            chunks[row] = msgspec.structs.replace(chunk, object=-1, start=0)
        else:
            chunks[row] = msgspec.structs.replace(chunk, digest=self.rng.randbytes(16))
        return [
            msgspec.structs.replace(each, chunks=Chunks.of(chunks)) if each.rank == rank else each for each in receipts
        ]


def _said(outcome: Manifest | ConflictError) -> object:
    """Return what a merge came to, in terms that do not depend on the order in which things are listed."""
    if isinstance(outcome, ConflictError):
        return outcome.kind, str(outcome), outcome.rank
    tensors = outcome.tensors
    chunks = {
        (tensors[c.tensor], c.offset, c.size, outcome.objects[c.object].key, c.start, c.nbytes, c.digest)
        for c in outcome.chunks
    }
    assert len(chunks) == len(outcome.chunks)
    return outcome.items, set(tensors), set(outcome.values), outcome.objects, chunks


def _outcome(merging: object, receipts: list[Receipt]) -> Manifest | ConflictError:
    assert callable(merging)
    try:
        found: Manifest = merging(receipts)
    except ConflictError as error:
        return error
    return found


@pytest.mark.parametrize("breaking", [False, True], ids=["whole", "broken"])
@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_it_says_what_the_merge_by_rows_says(breaking: bool, seed: int) -> None:
    maker = RandomReceipts(random.Random(seed))
    receipts = maker.receipts()
    if breaking:
        receipts = maker.broken(receipts)
    wanted = _outcome(merge_by_rows.merge, receipts)
    # Borders that only large jobs reach: batches of receipts and of tensors, and numbers of tensors of many digits.
    with patch.multiple(merging, _TABLES_AT_ONCE=2, _BATCH_ROWS=3, _RADIX_BITS=1 + seed % 16):
        found = _outcome(merge, receipts)
    assert _said(found) == _said(wanted), f"seed {seed}"
    if not breaking:
        assert isinstance(found, Manifest), f"seed {seed}: {found}"


@pytest.mark.parametrize("field", ["boxes", "places", "digests"])
def test_of_receipts_that_are_unpacked_together_the_one_that_does_not_decode_is_named(field: str) -> None:
    merged = merging.Merge(ATTEMPT, 3)
    for rank in range(3):
        maker = ReceiptMaker(ATTEMPT, rank, 3)
        maker.tensor("t", np.arange(6), Box((2 * rank,), (2,)))
        packed = pack_receipt(maker.receipt())
        if rank == 1:
            packed = msgspec.structs.replace(packed, chunks=msgspec.structs.replace(packed.chunks, **{field: b"?"}))
        merged.add(seal_receipt(packed), f"the receipt of rank {rank}")
    with pytest.raises(CorruptError, match="the receipt of rank 1"):
        merged.manifest()


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_is_made_by_cutting_is_told_apart_and_whatever_overlaps_is_not(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 4)))
    cells = RandomReceipts(rng).cut(Box.whole(shape), 6)
    rng.shuffle(cells)
    tensors = [rng.randint(0, 2)] * len(cells)
    other = max(tensors) + 1
    table = Boxes.of([*tensors, other], [*cells, cells[0]])
    assert unseparated(table.take(np.argsort(table.tensor, kind="stable"))).tolist() == [], f"seed {seed}"
    twice = Boxes.of([*tensors, tensors[0]], [*cells, rng.choice(cells)])
    assert len(unseparated(twice)) == 2, f"seed {seed}"


def test_a_pinwheel_is_compared_box_by_box_and_found_sound() -> None:
    full = np.arange(9, dtype=np.int32).reshape(3, 3)
    maker = ReceiptMaker(ATTEMPT)
    for offset, size in (((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))):
        maker.tensor("w", full, Box(offset, size))
    receipt = maker.receipt()
    assert len(unseparated(receipt.chunks.boxes)) == 5
    assert len(merge([receipt]).chunks) == 5
