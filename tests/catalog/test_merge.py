"""Commit proves coverage: whole states merge, and everything else is refused by name."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.catalog.merge import Merge
from resilient.errors import ConflictError, ErrorKind
from resilient.format.box import Box
from resilient.format.chunks import Chunk, Chunks
from resilient.format.digest import digest
from resilient.format.documents import Manifest, Receipt
from resilient.format.layout import Attempt
from resilient.format.receipts import encode_receipt
from tests.catalog.runs import ReceiptMaker, merge

ATTEMPT = Attempt(step=7, generation=3, nonce="00112233aabbccdd")
FULL = np.arange(48, dtype=np.float32).reshape(8, 6)


def merged(*makers: ReceiptMaker) -> Manifest:
    receipts = [maker.receipt() for maker in makers]
    return merge(receipts)


def two() -> tuple[ReceiptMaker, ReceiptMaker]:
    return ReceiptMaker(ATTEMPT, 0, 2), ReceiptMaker(ATTEMPT, 1, 2)


def test_shards_of_all_ranks_become_one_manifest_with_indices_of_its_own() -> None:
    a, b = two()
    a.tensor("w", FULL, Box((0, 0), (4, 6))).tensor("only0", np.zeros(3, dtype=np.int64))
    b.tensor("other1", np.ones(2, dtype=np.int64)).tensor("w", FULL, Box((4, 0), (4, 6)))
    manifest = merged(a, b)
    names = [tensor.name for tensor in manifest.tensors]
    assert sorted(names) == ["only0", "other1", "w"]
    assert [each.key for each in manifest.objects] == [ATTEMPT.data(0, 0), ATTEMPT.data(1, 0)]
    placed = {(names[c.tensor], c.offset): (c.object, c.start, c.nbytes) for c in manifest.chunks}
    assert placed == {
        ("w", (0, 0)): (0, 0, 96),
        ("w", (4, 0)): (1, 16, 96),
        ("only0", (0,)): (0, 96, 24),
        ("other1", (0,)): (1, 0, 16),
    }
    stored = [digest(encode_receipt(maker.receipt())) for maker in (a, b)]
    assert [(ref.rank, ref.digest) for ref in manifest.receipts] == list(enumerate(stored))
    assert (manifest.step, manifest.generation, manifest.nonce, manifest.world_size) == (7, 3, ATTEMPT.nonce, 2)


def test_of_equal_copies_the_lowest_ranks_counts() -> None:
    a, b = two()
    a.tensor("w", FULL)
    b.tensor("w", FULL)
    manifest = merged(a, b)
    assert [(chunk.object, chunk.start) for chunk in manifest.chunks] == [(0, 0)]
    assert len(manifest.objects) == 2, "the other copy is stored all the same, and is deleted with the rest"


def test_scalars_and_empty_tensors_are_whole() -> None:
    manifest = merged(ReceiptMaker(ATTEMPT).tensor("s", np.array(3.0)).tensor("e", np.zeros((0, 5), dtype=np.float32)))
    assert [chunk.size for chunk in manifest.chunks] == [()]
    assert [tensor.shape for tensor in manifest.tensors] == [(), (0, 5)]


def test_replicas_without_a_digest_are_not_compared_and_with_one_they_are() -> None:
    a, b = two()
    a.tensor("w", FULL)
    b.tensor("w", FULL + 1, store=False, known=False)
    merged(a, b)
    a, b = two()
    a.tensor("w", FULL)
    b.tensor("w", FULL + 1, store=False)
    with pytest.raises(ConflictError, match=r"'model', 'w' has different values on ranks 0-1") as caught:
        merged(a, b)
    assert caught.value.kind is ErrorKind.DIVERGENT
    assert "per_rank" in str(caught.value.hint)
    assert "Shard" in str(caught.value.hint)


def test_a_replica_may_be_listed_whole_where_its_chunks_are_stored_by_several_ranks() -> None:
    a, b = two()
    a.tensor("w", FULL, Box((0, 0), (4, 6))).tensor("w", FULL, store=False, known=False)
    b.tensor("w", FULL, Box((4, 0), (4, 6))).tensor("w", FULL, store=False, known=False)
    assert len(merged(a, b).chunks) == 2


def test_per_rank_items_are_kept_apart_and_wanted_of_every_rank() -> None:
    a, b = two()
    a.item("rng", per_rank=True).tensor("state", FULL, item="rng").value("seed", 1, item="rng")
    b.item("rng", per_rank=True).tensor("state", FULL + 1, item="rng").value("seed", 2, item="rng")
    manifest = merged(a, b)
    assert [(tensor.name, tensor.rank) for tensor in manifest.tensors] == [("state", 0), ("state", 1)]
    assert [value.rank for value in manifest.values] == [0, 1]


def test_an_item_that_can_be_derived_may_be_missing_on_a_rank() -> None:
    a, b = two()
    a.item("rng", per_rank=True, derived=True).tensor("state", FULL, item="rng")
    assert [tensor.rank for tensor in merged(a, b).tensors] == [0]


def test_tied_tensors_are_stored_once() -> None:
    a = ReceiptMaker(ATTEMPT).tensor("embed", FULL).alias("head", FULL, "embed")
    manifest = merged(a)
    assert [(tensor.name, tensor.alias) for tensor in manifest.tensors] == [("embed", None), ("head", "embed")]
    assert len(manifest.chunks) == 1


def _hole(a: ReceiptMaker, b: ReceiptMaker) -> None:
    a.tensor("w", FULL, Box((0, 0), (4, 6)))
    b.tensor("w", FULL, Box((5, 0), (3, 6)))


def _held_and_not_stored(a: ReceiptMaker, b: ReceiptMaker) -> None:
    a.tensor("w", FULL, store=False)
    b.tensor("w", FULL, store=False)


def _nobody_holds_it(a: ReceiptMaker, b: ReceiptMaker) -> None:
    a.alias("w", FULL, "nowhere")


def _overlap(a: ReceiptMaker, b: ReceiptMaker) -> None:
    a.tensor("w", FULL, Box((0, 0), (5, 6)))
    b.tensor("w", FULL, Box((4, 0), (4, 6)))


def _held_across_chunks(a: ReceiptMaker, b: ReceiptMaker) -> None:
    a.tensor("w", FULL, Box((0, 0), (4, 6)))
    b.tensor("w", FULL, Box((4, 0), (4, 6))).tensor("w", FULL, Box((2, 0), (4, 6)), store=False)


def _shapes(a: ReceiptMaker, b: ReceiptMaker) -> None:
    a.tensor("w", FULL)
    b.tensor("w", FULL[:4])


def _dtypes(a: ReceiptMaker, b: ReceiptMaker) -> None:
    a.tensor("w", FULL)
    b.tensor("w", FULL.astype(np.int32))


def _values(a: ReceiptMaker, b: ReceiptMaker) -> None:
    a.value("w", 1)
    b.value("w", 2)


def _tied_on_one_rank_only(a: ReceiptMaker, b: ReceiptMaker) -> None:
    a.tensor("v", FULL).alias("w", FULL, "v")
    b.tensor("v", FULL).tensor("w", FULL)


def _item_missing(a: ReceiptMaker, b: ReceiptMaker) -> None:
    a.item("w", per_rank=True)


def _item_described_differently(a: ReceiptMaker, b: ReceiptMaker) -> None:
    a.item("w", per_rank=True)
    b.item("w")


def _unknown_dtype(a: ReceiptMaker, b: ReceiptMaker) -> None:
    a.tensor("w", np.zeros(2, dtype=np.float32))
    b._tensor("model", "w2", "float3", (1,), None)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (_hole, "incomplete", ["'w'", "6 of its elements", "ranks 0-1"]),
        (_held_and_not_stored, "incomplete", ["'w'", "48 of its elements"]),
        (_nobody_holds_it, "incomplete", ["'w'", "'nowhere'"]),
        (_overlap, "divergent", ["'w'", "overlap", "[0:5, 0:6]", "[4:8, 0:6]", "ranks 0-1"]),
        (_held_across_chunks, "divergent", ["'w'", "overlap", "[2:6, 0:6]"]),
        (_shapes, "divergent", ["'w'", "[8, 6]", "[4, 6]", "ranks 0-1"]),
        (_dtypes, "divergent", ["'w'", "float32", "int32"]),
        (_values, "divergent", ["'w'", "different values", "ranks 0-1"]),
        (_tied_on_one_rank_only, "divergent", ["'w'", "described differently"]),
        (_item_missing, "incomplete", ["'w'", "rank 1"]),
        (_item_described_differently, "divergent", ["'w'", "ranks 0-1"]),
        (_unknown_dtype, "divergent", ["'w2'", "float3"]),
    ],
)
def test_a_hole_or_a_contradiction_fails_the_commit_with_the_names(
    make: Callable[[ReceiptMaker, ReceiptMaker], None], kind: str, words: list[str]
) -> None:
    a, b = two()
    make(a, b)
    with pytest.raises(ConflictError) as caught:
        merged(a, b)
    assert caught.value.kind == kind
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "change",
    [
        {"tensor": 4},
        {"tensor": -1},
        {"object": 3},
        {"start": 1},
        {"start": -4},
        {"nbytes": 100},
        {"digest": b""},
        {"size": (9, 6)},
        {"offset": (-1, 0)},
        {"size": (8,), "offset": (0,)},
    ],
    ids=str,
)
def test_a_chunk_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    receipt = ReceiptMaker(ATTEMPT).tensor("w", FULL).receipt()
    (chunk,) = receipt.chunks
    broken: Chunk = msgspec.structs.replace(chunk, **change)
    with pytest.raises(ConflictError):
        merge([msgspec.structs.replace(receipt, chunks=Chunks.of([broken]))])


def test_one_receipt_of_each_rank_is_wanted() -> None:
    a, b = two()
    for receipts in ([a.receipt()], [b.receipt(), a.receipt()], [a.receipt(), a.receipt()]):
        with pytest.raises(ConflictError, match="wanted"):
            merge(receipts)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_grid_merges_and_any_missing_or_changed_cell_is_noticed(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**32))
    rng = random.Random(seed)
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    cuts = [sorted(rng.sample(range(1, n), rng.randint(0, n - 1))) for n in shape]
    edges = [list(zip([0, *cut], [*cut, n], strict=True)) for cut, n in zip(cuts, shape, strict=True)]
    cells = [Box((), ())]
    for axis in edges:
        cells = [Box((*c.offset, a), (*c.size, b - a)) for c in cells for a, b in axis]
    world_size = rng.randint(1, 4)
    full = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    makers = [ReceiptMaker(ATTEMPT, rank, world_size) for rank in range(world_size)]
    for cell in cells:
        holders = rng.sample(range(world_size), rng.randint(1, world_size))
        storing = rng.choice(holders)
        for rank in holders:
            makers[rank].tensor("w", full, cell, store=rank == storing or rng.random() < 0.2, known=rng.random() < 0.5)
    manifest = merged(*makers)
    rebuilt = np.full(shape, -1, dtype=np.int32)
    contents = [b"".join(maker.data) for maker in makers if maker.data]
    for chunk in manifest.chunks:
        part = contents[chunk.object][chunk.start : chunk.start + chunk.nbytes]
        rebuilt[chunk.box.relative_to(Box.whole(shape))] = np.frombuffer(part, np.int32).reshape(chunk.size)
    assert np.array_equal(rebuilt, full), f"seed {seed}"

    lost = rng.choice(cells)
    receipts: list[Receipt] = [maker.receipt() for maker in makers]
    kept = [
        msgspec.structs.replace(each, chunks=Chunks.of(chunk for chunk in each.chunks if chunk.box != lost))
        for each in receipts
    ]
    with pytest.raises(ConflictError) as caught:
        merge(kept)
    assert caught.value.kind is ErrorKind.INCOMPLETE, f"seed {seed}"


def test_a_chunk_that_is_stored_shorter_than_it_is_keeps_its_codec() -> None:
    receipt = ReceiptMaker(ATTEMPT).tensor("w", FULL).receipt()
    (chunk,) = receipt.chunks
    coded = msgspec.structs.replace(chunk, codec=1, nbytes=chunk.nbytes - 5)
    merged_one = merge([msgspec.structs.replace(receipt, chunks=Chunks.of([coded]))])
    assert list(merged_one.chunks) == [coded]


@pytest.mark.field_report("BR-206", "BR-207")
def test_256_ranks_with_1000_tensors_merge_in_seconds() -> None:
    ranks, tensors = 256, 1000
    maker = ReceiptMaker(ATTEMPT, 0, ranks).tensor("t", np.zeros((ranks, 2), dtype=np.float32), Box((0, 0), (1, 2)))
    receipt = maker.receipt()
    described = tuple(msgspec.structs.replace(receipt.tensors[0], name=f"t{number}") for number in range(tensors))
    (chunk,) = receipt.chunks
    merging = Merge(ATTEMPT, ranks)
    elapsed_s = 0.0
    for rank in range(ranks):
        chunks = [msgspec.structs.replace(chunk, tensor=number, offset=(rank, 0)) for number in range(tensors)]
        stored = encode_receipt(
            msgspec.structs.replace(receipt, rank=rank, tensors=described, chunks=Chunks.of(chunks))
        )
        started_s = time.monotonic()
        merging.add(stored, "it")
        elapsed_s += time.monotonic() - started_s
    started_s = time.monotonic()
    manifest = merging.manifest()
    elapsed_s += time.monotonic() - started_s
    assert len(manifest.chunks) == ranks * tensors
    assert elapsed_s < 10, elapsed_s  # a hundredth of a pairwise comparison of the shards
