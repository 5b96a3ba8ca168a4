"""How an attempt becomes a checkpoint: any rank may commit, one COMMIT wins, and torn documents count as absent."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from resilient.catalog.commit import read_commit, try_commit, write_receipt
from resilient.catalog.contents import read_manifest
from resilient.catalog.fetch import read_chunk
from resilient.clock import SYSTEM_CLOCK
from resilient.errors import ConflictError, CorruptError, ErrorKind
from resilient.format.box import Box
from resilient.format.documents import Commit
from resilient.format.receipts import decode_receipt, encode_receipt
from resilient.store.memory import MemoryStore
from tests.catalog.runs import HandClock, ReceiptMaker, attempt_of, commit_of, new_generation, save, tensors_of


def test_a_committed_state_reads_back_bit_for_bit() -> None:
    store = MemoryStore()
    attempt = save(store, new_generation(store), 5, world_size=3)
    commit = read_commit(store, attempt)
    assert commit is not None
    assert (commit.world_size, commit.items, commit.committer) == (3, ("rng", "model"), 0)
    manifest = read_manifest(store, commit)
    assert commit.nbytes == manifest.nbytes == 24 * 4 + 3 * 8 + 3 * 16
    found = np.zeros((6, 4), dtype=np.float32)
    for chunk in manifest.chunks:
        if manifest.tensors[chunk.tensor].name == "w":
            data = bytearray(chunk.nbytes)
            read_chunk(store, manifest, chunk, memoryview(data))
            found[chunk.offset[0] : chunk.offset[0] + chunk.size[0]] = np.frombuffer(data, np.float32).reshape(
                chunk.size
            )
    assert np.array_equal(found, tensors_of(5)["w"])


def test_missing_receipts_are_told_by_rank_and_nothing_is_committed() -> None:
    store = MemoryStore()
    claim = new_generation(store)
    attempt = attempt_of(claim, 1)
    ReceiptMaker(attempt, 1, 4).tensor("w", np.zeros(2)).write(store)
    assert commit_of(store, attempt, world_size=4) == (0, 2, 3)
    assert read_commit(store, attempt) is None


@pytest.mark.field_report("BR-034")
def test_any_rank_may_commit_and_all_get_the_one_commit() -> None:
    store = MemoryStore()
    attempt = save(store, new_generation(store), 1, world_size=8, commit=False)
    outcomes: list[object] = []
    barrier = threading.Barrier(8)

    def commit(rank: int) -> None:
        barrier.wait(10)
        outcomes.append(commit_of(store, attempt, world_size=8, committer=rank))

    threads = [threading.Thread(target=commit, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(outcomes) == 8
    assert all(outcome == outcomes[0] and isinstance(outcome, Commit) for outcome in outcomes)
    assert outcomes[0] == read_commit(store, attempt)


def test_a_committer_that_comes_late_finds_the_commit_even_without_receipts() -> None:
    store = MemoryStore()
    attempt = save(store, new_generation(store), 1)
    for rank in range(2):
        store.delete(attempt.receipt(rank))
    assert commit_of(store, attempt, committer=1) == read_commit(store, attempt)


def test_a_retry_after_a_lost_response_recognizes_its_own_writes() -> None:
    class Lossy(MemoryStore):
        lost = 0

        def create(self, key: str, data: bytes) -> bool:
            super().create(key, data)
            self.lost += 1
            return super().create(key, data)  # as a client that never heard the first answer

    store = Lossy()
    attempt = save(store, new_generation(store), 1)
    assert store.lost
    assert isinstance(read_commit(store, attempt), Commit)


def test_a_rank_cannot_save_a_step_twice_with_other_contents() -> None:
    store = MemoryStore()
    attempt = attempt_of(new_generation(store), 1)
    receipt = ReceiptMaker(attempt).tensor("w", np.zeros(2)).write(store)
    write_receipt(store, receipt)
    with pytest.raises(ConflictError) as caught:
        write_receipt(store, ReceiptMaker(attempt).tensor("w", np.ones(2)).receipt())
    assert caught.value.kind is ErrorKind.ALREADY_SAVED
    assert "rank 0" in str(caught.value)


def test_a_hole_is_never_committed() -> None:
    store = MemoryStore()
    attempt = attempt_of(new_generation(store), 1)
    ReceiptMaker(attempt).tensor("w", np.zeros(2), store=False).write(store)
    with pytest.raises(ConflictError) as caught:
        commit_of(store, attempt, world_size=1)
    assert caught.value.kind is ErrorKind.INCOMPLETE
    assert read_commit(store, attempt) is None


def test_an_attempt_with_a_tombstone_is_not_committed() -> None:
    store = MemoryStore()
    attempt = save(store, new_generation(store), 1, commit=False)
    store.create(attempt.tombstone, b"")
    with pytest.raises(ConflictError, match="given up"):
        commit_of(store, attempt)
    assert read_commit(store, attempt) is None


def test_a_torn_receipt_is_named() -> None:
    store = MemoryStore()
    attempt = save(store, new_generation(store), 1, commit=False)
    store.put(attempt.receipt(1), [store.get(attempt.receipt(1))[:-1]])
    with pytest.raises(CorruptError, match=attempt.receipt(1)):
        commit_of(store, attempt)


def test_receipts_of_another_world_size_are_refused() -> None:
    store = MemoryStore()
    attempt = save(store, new_generation(store), 1, world_size=3, commit=False)
    with pytest.raises(ConflictError, match="rank 0 of 3"):
        commit_of(store, attempt, world_size=2)


def test_a_torn_commit_counts_as_absent_and_is_not_replaced() -> None:
    store = MemoryStore()
    attempt = save(store, new_generation(store), 1, commit=False)
    store.create(attempt.commit, b'{"commit')
    assert read_commit(store, attempt) is None
    with pytest.raises(CorruptError, match="COMMIT"):
        commit_of(store, attempt)


@pytest.mark.parametrize("damage", ["remove", "empty", "truncate", "flip", "swap"])
def test_a_manifest_that_is_not_the_committed_one_is_refused_by_name(damage: str) -> None:
    store = MemoryStore()
    claim = new_generation(store)
    commit = read_commit(store, save(store, claim, 1))
    other = read_commit(store, save(store, claim, 2))
    assert commit is not None
    assert other is not None
    key = commit.attempt.manifest(commit.manifest)
    content = store.get(key)
    flipped = bytearray(content)
    flipped[-3] ^= 1
    if damage == "remove":
        store.delete(key)
    else:
        swapped = store.get(other.attempt.manifest(other.manifest))
        store.put(key, [{"empty": b"", "truncate": content[:-1], "flip": bytes(flipped), "swap": swapped}[damage]])
    with pytest.raises(CorruptError, match=key):
        read_manifest(store, commit)


def test_a_manifest_of_another_attempt_is_refused_even_if_commit_names_it() -> None:
    store = MemoryStore()
    claim = new_generation(store)
    commit = read_commit(store, save(store, claim, 1))
    other = read_commit(store, save(store, claim, 2))
    assert commit is not None
    assert other is not None
    content = store.get(other.attempt.manifest(other.manifest))
    store.put(commit.attempt.manifest(other.manifest), [content])
    lie = Commit(
        **{name: getattr(commit, name) for name in commit.__slots__}
        | {"manifest": other.manifest, "manifest_nbytes": len(content)}
    )
    with pytest.raises(CorruptError, match="describes step 2"):
        read_manifest(store, lie)


@pytest.mark.parametrize("damage", ["flip", "remove", "truncate"])
def test_a_wrong_byte_is_never_read(damage: str) -> None:
    store = MemoryStore()
    attempt = save(store, new_generation(store), 1)
    commit = read_commit(store, attempt)
    assert commit is not None
    manifest = read_manifest(store, commit)
    key = attempt.data(1, 0)
    content = bytearray(store.get(key))
    content[0] ^= 1
    if damage == "remove":
        store.delete(key)
    else:
        store.put(key, [content if damage == "flip" else b"\0"])
    (chunk,) = (one for one in manifest.chunks if manifest.objects[one.object].key == key and one.start == 0)
    with pytest.raises(CorruptError) as caught:
        read_chunk(store, manifest, chunk, memoryview(bytearray(chunk.nbytes)))
    assert key in str(caught.value)
    assert "'w'" in str(caught.value)
    assert caught.value.rank == 1


def test_commit_says_when_by_the_clock_it_is_given() -> None:
    store = MemoryStore()
    attempt = save(store, new_generation(store), 1, commit=False)
    commit = try_commit(store, attempt, world_size=2, committer=1, reason="preemption", clock=HandClock())
    assert isinstance(commit, Commit)
    assert (commit.created, commit.reason, commit.committer) == ("2026-01-01T00:00:00.000Z", "preemption", 1)


def test_committers_that_saw_different_sets_write_different_manifests_and_one_commit_wins() -> None:
    store = MemoryStore()
    attempt = save(store, new_generation(store), 1, commit=False)

    class Other(MemoryStore):
        """The same place, seen by a committer that reads another receipt of rank 1 (a store after a failover)."""

        def get(self, key: str) -> bytes:
            if key != attempt.receipt(1):
                return store.get(key)
            receipt = decode_receipt(store.get(key), key)
            return encode_receipt(msgspec.structs.replace(receipt, items=receipt.items[::-1]))

        def create(self, key: str, data: bytes) -> bool:
            return store.create(key, data)

        def size(self, key: str) -> int:
            return store.size(key)

    first = commit_of(store, attempt)
    store.delete(attempt.commit)  # as if both were between manifest and COMMIT
    second = try_commit(Other(), attempt, world_size=2, committer=1, reason="test", clock=SYSTEM_CLOCK)
    assert isinstance(first, Commit)
    assert isinstance(second, Commit)
    manifests = [key for key in store.list(attempt.prefix) if "manifest-" in key]
    assert len(manifests) == 2
    assert commit_of(store, attempt) == second
    read_manifest(store, second)


class Asked(MemoryStore):
    """Notes which receipts are asked for, and lists those of ``hidden`` ranks only later, as a stale store may."""

    def __init__(self, hidden: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.hidden = hidden
        self.asked: list[str] = []

    def get(self, key: str) -> bytes:
        self.asked.append(key)
        return super().get(key)

    def list(self, prefix: str) -> Iterator[str]:
        return (key for key in super().list(prefix) if not any(key.endswith(f"{rank:06d}") for rank in self.hidden))

    def receipts_asked(self) -> int:
        return sum("/receipts/" in key for key in self.asked)


def test_waiting_for_a_large_job_asks_for_few_names_and_a_stale_listing_delays_nothing() -> None:
    world_size, last = 500, 499
    store = Asked(hidden=frozenset({3, 77, 400}))
    attempt = attempt_of(new_generation(store), 1)
    row = np.zeros((world_size, 1), np.float32)
    for rank in range(last):
        ReceiptMaker(attempt, rank, world_size).tensor("w", row, Box((rank, 0), (1, 1))).write(store)
    store.asked.clear()
    for _ in range(10):
        assert commit_of(store, attempt, world_size=world_size) == (last,)
    assert store.receipts_asked() <= 10 * 4, "only those that are not listed"
    ReceiptMaker(attempt, last, world_size).tensor("w", row, Box((last, 0), (1, 1))).write(store)
    assert isinstance(commit_of(store, attempt, world_size=world_size), Commit), "not listed is not missing"


def test_of_a_job_that_has_hardly_begun_a_few_ranks_are_looked_for() -> None:
    store = Asked()
    attempt = attempt_of(new_generation(store), 1)
    store.asked.clear()
    assert commit_of(store, attempt, world_size=5000) == tuple(range(5000))
    assert store.receipts_asked() <= 64
