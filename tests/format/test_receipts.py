"""A receipt comes back as it was, whatever it says, and what ranks have in common is stored in equal bytes."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.errors import CorruptError
from resilient.format.chunks import Chunks
from resilient.format.documents import Item, Object, Receipt, Tensor, Value
from resilient.format.receipts import decode_receipt, encode_receipt, pack_receipt, seal_receipt
from tests.format.test_chunks import some_chunks


def some_receipt(rng: random.Random, rank: int) -> Receipt:
    """Return a receipt with shared and own tensors and values, in any order."""
    names = [f"n{number}" for number in range(rng.randint(0, 6))]
    return Receipt(
        step=rng.randrange(1 << 40),
        generation=3,
        nonce="00112233aabbccdd",
        rank=rank,
        world_size=9,
        items=(Item("model", "module"), Item("rng", "mapping", per_rank=True, derived=True)),
        tensors=tuple(
            Tensor("rng", name, (name, -1, (b"\1",)), "uint8", (rng.randint(0, 9),), rng.choice([None, rank, rank + 1]))
            for name in names
        ),
        objects=tuple(Object(name, rng.randrange(1 << 50)) for name in names),
        chunks=Chunks.of(some_chunks(rng, rng.randint(0, 9))),
        values=tuple(
            Value("rng", name, (name,), rng.randbytes(3), rng.choice([None, rank, rank + 1])) for name in names
        ),
    )


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_receipt_comes_back(seed: int) -> None:
    receipt = some_receipt(random.Random(seed), 4)
    assert decode_receipt(encode_receipt(receipt), "it") == receipt, f"seed {seed}"


def test_ranks_with_the_same_names_have_the_same_structure_whoever_they_are() -> None:
    def receipt(rank: int) -> Receipt:
        return Receipt(
            step=rank,
            generation=1,
            nonce="",
            rank=rank,
            world_size=2,
            items=(Item("rng", "mapping", per_rank=True),),
            tensors=(Tensor("rng", "state", ("state",), "uint8", (4,), rank),),
            objects=(Object(str(rank), rank),),
            chunks=Chunks.of(()),
            values=(Value("rng", "seed", ("seed",), bytes([rank]), rank),),
        )

    assert pack_receipt(receipt(0)).structure == pack_receipt(receipt(1)).structure


@pytest.mark.parametrize("field", ["structure", "shared", "chunks.boxes", "chunks.places", "chunks.digests"])
def test_a_block_that_does_not_decode_is_an_error_that_names_the_receipt(field: str) -> None:
    # Nobody but a broken writer makes such a thing: the seal is right.
    packed = pack_receipt(some_receipt(random.Random(5), 4))
    assert len(packed.own) < len(packed.objects)
    outer, _, inner = field.rpartition(".")
    for broken in (b"", b"nonsense", packed.shared):
        changed = msgspec.structs.replace(packed.chunks, **{inner: broken}) if outer else broken
        replaced = msgspec.structs.replace(packed, **{outer or inner: changed})
        if replaced != packed:
            with pytest.raises(CorruptError, match="its receipt"):
                decode_receipt(seal_receipt(replaced), "its receipt")
