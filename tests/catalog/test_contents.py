"""Part of a manifest says of what it covers what the whole one says, costs little, and is verified."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.catalog import contents
from resilient.catalog.commit import write_receipt
from resilient.catalog.contents import PartialManifest, open_manifest, read_manifest
from resilient.errors import CorruptError
from resilient.format import manifests
from resilient.format.box import Box
from resilient.format.chunks import Boxes
from resilient.format.documents import Commit
from resilient.store.memory import MemoryStore
from tests.catalog.runs import ReceiptMaker, attempt_of, commit_of, new_generation
from tests.catalog.test_merge_at_scale import RandomReceipts


class Counting(MemoryStore):
    """Counts the bytes that are read of manifests."""

    nbytes = 0

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        super().read_into(key, start, into)
        self.nbytes += len(into) if "/manifest-" in key else 0


class BadWire(MemoryStore):
    """Flips a bit in the first so many answers to each question."""

    flips = 0

    def __init__(self) -> None:
        super().__init__()
        self._asked: Counter[object] = Counter()

    def get(self, key: str) -> bytes:
        content = bytearray(super().get(key))
        self._damage(memoryview(content), key)
        return bytes(content)

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        super().read_into(key, start, into)
        self._damage(into, (key, start))

    def _damage(self, content: memoryview, question: object) -> None:
        self._asked[question] += 1
        if self._asked[question] <= self.flips:
            content[content.nbytes // 2] ^= 1


@pytest.fixture
def paged() -> Iterator[None]:
    """Make pages small, and no manifest so small that it is read at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents, "_WHOLE_NBYTES", 0)
        patch.setattr(contents, "_GAP_NBYTES", 0)
        patch.setattr(manifests, "_PAGE_ROWS", 6)
        patch.setattr(manifests, "_NEIGHBORS", 3)
        yield


def rows_of_ranks(store: MemoryStore, *, ranks: int, tensors: int) -> Commit:
    """Commit tensors of which each rank has a row."""
    attempt = attempt_of(new_generation(store), 1)
    full = np.zeros((ranks, 2), np.float32)
    for rank in range(ranks):
        maker = ReceiptMaker(attempt, rank, ranks)
        for number in range(tensors):
            maker.tensor(f"t{number}", full, Box((rank, 0), (1, 2)))
        maker.write(store)
    commit = commit_of(store, attempt, world_size=ranks)
    assert isinstance(commit, Commit)
    return commit


@pytest.mark.usefixtures("paged")
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_part_holds_what_the_whole_holds_of_it(seed: int) -> None:
    rng = random.Random(seed)
    store = MemoryStore()
    attempt = attempt_of(new_generation(store), 7)
    receipts = RandomReceipts(rng, attempt).receipts()
    for receipt in receipts:
        write_receipt(store, receipt)
    commit = commit_of(store, attempt, world_size=len(receipts))
    assert isinstance(commit, Commit)
    whole, part = read_manifest(store, commit), open_manifest(store, commit)
    assert isinstance(part, PartialManifest)
    assert (part.items, part.tensors, part.objects, part.values) == (
        whole.items,
        whole.tensors,
        whole.objects,
        whole.values,
    )
    tensors, boxes = [], []
    for number, tensor in enumerate(whole.tensors):
        for _ in range(rng.randint(0, 2)):
            offset = tuple(rng.randint(0, extent) for extent in tensor.shape)
            size = tuple(rng.randint(0, extent - start) for start, extent in zip(offset, tensor.shape, strict=True))
            tensors.append(number)
            boxes.append(Box(offset, size))
    wanted = Boxes.of(tensors, boxes)
    found = part.overlapping(wanted)
    assert sorted(found, key=repr) == sorted(whole.overlapping(wanted), key=repr), f"seed {seed}"


@pytest.mark.usefixtures("paged")
def test_a_rank_that_wants_its_row_reads_the_index_and_little_else() -> None:
    store = Counting()
    commit = rows_of_ranks(store, ranks=60, tensors=20)
    assert commit.index_nbytes is not None
    part = open_manifest(store, commit)
    assert store.nbytes == commit.index_nbytes
    found = part.overlapping(Boxes.of(range(20), [Box((41, 0), (1, 2))] * 20))
    assert sorted((chunk.tensor, chunk.offset) for chunk in found) == [(number, (41, 0)) for number in range(20)]
    assert store.nbytes - commit.index_nbytes < 0.15 * (commit.manifest_nbytes - commit.index_nbytes)


def test_a_small_manifest_is_read_at_once() -> None:
    store = Counting()
    commit = rows_of_ranks(store, ranks=3, tensors=2)
    assert open_manifest(store, commit) == read_manifest(store, commit)
    assert store.nbytes == 0


@pytest.mark.usefixtures("paged")
def test_every_changed_byte_of_the_parts_that_are_read_is_noticed_and_the_others_do_no_harm() -> None:
    store = MemoryStore()
    commit = rows_of_ranks(store, ranks=8, tensors=3)
    assert commit.index_nbytes is not None
    key = commit.attempt.manifest(commit.manifest)
    content = store.get(key)
    wanted = Boxes.of(range(3), [Box((5, 0), (1, 2))] * 3)
    expected = list(read_manifest(store, commit).overlapping(wanted))
    refused = 0
    for at in range(0, len(content), 3):
        store.put(key, [content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]])
        found = None
        with suppress(CorruptError):
            found = list(open_manifest(store, commit).overlapping(wanted))
        assert found in (None, expected), at
        assert found is None or at < len(content) - commit.index_nbytes, at
        refused += found is None
        with pytest.raises(CorruptError, match=key):
            read_manifest(store, commit)
    assert commit.index_nbytes < 3 * refused < len(content), "the index, the pages that were read, and no other"


@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize("damage", ["remove", "truncate", "swap"])
def test_a_manifest_that_is_not_the_committed_one_is_not_opened(damage: str) -> None:
    store = MemoryStore()
    commit = rows_of_ranks(store, ranks=4, tensors=2)
    key = commit.attempt.manifest(commit.manifest)
    content = store.get(key)
    if damage == "remove":
        store.delete(key)
    else:
        store.put(key, [content[:-1] if damage == "truncate" else content[:-9] + content[:9]])
    with pytest.raises(CorruptError, match=key):
        open_manifest(store, commit)


@pytest.mark.usefixtures("paged")
def test_a_page_that_vanishes_after_the_index_was_read_is_named() -> None:
    store = MemoryStore()
    commit = rows_of_ranks(store, ranks=4, tensors=2)
    part = open_manifest(store, commit)
    key = commit.attempt.manifest(commit.manifest)
    store.delete(key)
    with pytest.raises(CorruptError, match=key):
        part.overlapping(Boxes.of([0], [Box((0, 0), (4, 2))]))


@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize("flips", [1, 2])
def test_what_is_damaged_twice_on_its_way_is_read_right_in_the_end(flips: int) -> None:
    """One answer in twenty that is damaged is two in a row once in four hundred: that must fail no save."""
    store = BadWire()
    store.flips = flips
    commit = rows_of_ranks(store, ranks=4, tensors=9)  # reads the receipts
    found = list(open_manifest(store, commit).overlapping(Boxes.of(range(9), [Box((1, 0), (1, 2))] * 9)))
    assert len(found) == 9


@pytest.mark.usefixtures("paged")
def test_what_is_damaged_in_the_store_is_refused() -> None:
    store = BadWire()
    commit = rows_of_ranks(store, ranks=4, tensors=9)
    store.flips = 1_000_000
    with pytest.raises(CorruptError):
        open_manifest(store, commit).overlapping(Boxes.of(range(9), [Box((1, 0), (1, 2))] * 9))
