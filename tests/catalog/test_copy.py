"""A checkpoint comes to another place whole or not at all, every byte of it verified."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from resilient.catalog import copy as copying
from resilient.catalog.contents import read_manifest
from resilient.catalog.copy import copy
from resilient.catalog.fetch import read_chunk
from resilient.catalog.line import read_line
from resilient.catalog.verify import verify
from resilient.clock import SYSTEM_CLOCK
from resilient.errors import CorruptError, ErrorKind, NotFoundError, StoreError, UsageError
from resilient.format.digest import BytesLike
from resilient.format.documents import Commit, Manifest
from resilient.store import object_store, s3
from resilient.store.memory import MemoryStore
from resilient.store.open import open_store
from resilient.testing.proxy import FaultProxy
from tests.catalog.runs import ReceiptMaker, attempt_of, commit_of, new_generation, save
from tests.s3_server import S3Server


def a_run(*, world_size: int = 3) -> tuple[MemoryStore, Commit]:
    store = MemoryStore()
    claim = new_generation(store)
    for step in (1, 2):
        save(store, claim, step, world_size=world_size)
    return store, read_line(store).at(2)


def content_of(store: MemoryStore, commit: Commit) -> dict[tuple[str, int | None, tuple[int, ...]], bytes]:
    """Return the bytes of every chunk, by tensor, rank and offset."""
    manifest = read_manifest(store, commit)
    found = {}
    for chunk in manifest.chunks:
        data = bytearray(chunk.nbytes)
        read_chunk(store, manifest, chunk, memoryview(data))
        tensor = manifest.tensors[chunk.tensor]
        found[f"{tensor.item}.{tensor.name}", tensor.rank, chunk.offset] = bytes(data)
    return found


def described(manifest: Manifest) -> tuple[object, ...]:
    return (
        {item.name: item for item in manifest.items},
        {(tensor.item, tensor.name, tensor.rank): tensor for tensor in manifest.tensors},
        {(value.item, value.name, value.rank): value for value in manifest.values},
        manifest.world_size,
    )


def test_a_copy_is_equal_and_a_run_of_its_own() -> None:
    source, commit = a_run()
    there = MemoryStore()
    seen: list[tuple[int, int]] = []
    made = copy(source, commit, there, clock=SYSTEM_CLOCK, progress=lambda *pair: seen.append(pair))
    line = read_line(there)
    assert line.commits == (made,)
    assert (made.step, made.world_size, made.reason) == (2, 3, "test")
    assert verify(there, line.commits, deep=True, line=line).ok
    assert content_of(there, made) == content_of(source, commit)
    assert described(read_manifest(there, made)) == described(read_manifest(source, commit))
    assert seen[-1] == (commit.nbytes, commit.nbytes)


def test_a_copy_of_some_items_holds_these_alone() -> None:
    source, commit = a_run()
    there = MemoryStore()
    made = copy(source, commit, there, items=["rng"], clock=SYSTEM_CLOCK)
    assert made.items == ("rng",)
    wanted = {name: data for name, data in content_of(source, commit).items() if name[0].startswith("rng.")}
    assert content_of(there, made) == wanted
    assert made.nbytes == sum(map(len, wanted.values()))
    line = read_line(there)
    assert verify(there, line.commits, deep=True, line=line).ok


def test_an_unknown_item_is_named_with_those_that_there_are() -> None:
    source, commit = a_run()
    with pytest.raises(NotFoundError, match="'optimizer'") as caught:
        copy(source, commit, MemoryStore(), items=["model", "optimizer"], clock=SYSTEM_CLOCK)
    assert "rng" in str(caught.value.hint)


def test_a_large_state_is_copied_in_pieces_of_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    source, commit = a_run(world_size=1)
    monkeypatch.setattr(copying, "_OBJECT_NBYTES", 30)
    there = MemoryStore()
    made = copy(source, commit, there, clock=SYSTEM_CLOCK)
    assert len(list(there.list("data/"))) == 3
    assert content_of(there, made) == content_of(source, commit)


def test_a_wrong_byte_anywhere_leaves_nothing_that_counts() -> None:
    source, commit = a_run()
    for key in sorted(source.list("data/")):
        if "000000000002" not in key:
            continue
        content = bytearray(source.get(key))
        content[-1] ^= 1
        source.put(key, [content])
        there = MemoryStore()
        with pytest.raises(CorruptError, match=key):
            copy(source, commit, there, clock=SYSTEM_CLOCK)
        assert read_line(there).commits == ()
        assert list(there.list("data/")) == []
        content[-1] ^= 1
        source.put(key, [content])
        copy(source, commit, there, clock=SYSTEM_CLOCK)  # the same place can be used again
        assert read_line(there).commits[0].step == 2


def test_a_place_that_holds_something_is_refused() -> None:
    source, commit = a_run()
    with pytest.raises(UsageError) as caught:
        copy(source, commit, source, clock=SYSTEM_CLOCK)
    assert caught.value.kind is ErrorKind.DESTINATION_NOT_EMPTY
    foreign = MemoryStore()
    foreign.put("notes.txt", [b"mine"])
    with pytest.raises(UsageError, match=r"notes\.txt") as caught:
        copy(source, commit, foreign, clock=SYSTEM_CLOCK)
    assert caught.value.kind is ErrorKind.DESTINATION_NOT_EMPTY
    assert list(foreign.list("")) == ["notes.txt"]


def test_a_destination_that_fails_at_any_write_has_no_checkpoint() -> None:
    class Failing(MemoryStore):
        left = 10**9

        def _spend(self) -> None:
            self.left -= 1
            if self.left < 0:
                raise StoreError("full", kind=ErrorKind.NO_SPACE)

        def put(self, key: str, parts: Sequence[BytesLike]) -> None:
            self._spend()
            super().put(key, parts)

        def create(self, key: str, data: bytes) -> bool:
            self._spend()
            return super().create(key, data)

    source, commit = a_run()
    for budget in range(100):
        there = Failing()
        there.left = budget
        try:
            copy(source, commit, there, clock=SYSTEM_CLOCK)
        except StoreError:
            assert read_line(there).commits == ()
            # Once a COMMIT may be on its way, nothing goes that it would name unless a TOMBSTONE stops it.
            committing = sum("/receipts/" in key for key in there.list("steps/")) == commit.world_size
            assert committing or list(there.list("data/")) == []
            continue
        assert content_of(there, read_line(there).commits[0]) == content_of(source, commit)
        assert budget > 5
        return
    raise AssertionError("it never ran to its end")


@pytest.mark.parametrize("late", [False, True], ids=["response lost", "landed after the error"])
def test_a_commit_that_lands_although_it_failed_does_not_count_without_its_data(*, late: bool) -> None:
    class Lossy(MemoryStore):
        landing: tuple[str, bytes] | None = None

        def create(self, key: str, data: bytes) -> bool:
            if not key.endswith("COMMIT"):
                return super().create(key, data)
            self.landing = key, data
            if not late:
                super().create(key, data)
            raise StoreError("no answer", kind=ErrorKind.DEADLINE)

    source, commit = a_run()
    there = Lossy()
    with pytest.raises(StoreError, match="no answer"):
        copy(source, commit, there, clock=SYSTEM_CLOCK)
    assert there.landing is not None
    MemoryStore.create(there, *there.landing)
    assert read_line(there).commits == ()
    assert list(there.list("data/")) == []
    again = MemoryStore()
    again._objects = there._objects
    copied = copy(source, commit, again, clock=SYSTEM_CLOCK)
    assert read_line(again).commits == (copied,)


@pytest.mark.field_report("BR-224")
def test_uneven_and_empty_shards_and_derived_items_survive_a_copy() -> None:
    source, commit = a_run(world_size=7)  # six rows on seven ranks
    there = MemoryStore()
    made = copy(source, commit, there, clock=SYSTEM_CLOCK)
    assert content_of(there, made) == content_of(source, commit)
    assert np.array_equal(
        sorted(tensor.rank for tensor in read_manifest(there, made).tensors if tensor.rank is not None), range(7)
    )


@pytest.mark.s3
@pytest.mark.field_report("BR-019", "BR-134")
@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_a_copy_within_a_bucket_goes_in_parts_and_is_verified_at_once_by_the_client_that_made_it(
    s3_server: S3Server, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 5 << 20
    for module in (object_store, s3):
        monkeypatch.setattr(module, "REQUEST_BYTES", most)
    url, options = s3_server.fresh_url(), {**s3_server.options(), "client": client}
    source = open_store(f"{url}/a", storage_options=options)
    attempt = attempt_of(new_generation(source), 1)
    ReceiptMaker(attempt).tensor("w", np.arange(3 << 20, dtype=np.float32)).write(source)
    assert isinstance(commit_of(source, attempt, world_size=1), Commit)
    with FaultProxy(s3_server.endpoint) as wire:
        there = open_store(f"{url}/b", storage_options={**options, "endpoint_url": wire.url})
        assert list(there.list("")) == []
        copy(source, read_line(source).at(1), there, clock=SYSTEM_CLOCK)
        line = read_line(there)
        assert verify(there, line.commits, deep=True, line=line).ok
    assert sum(request.nbytes for request in wire.requests) > 12 << 20
    assert max(request.nbytes for request in wire.requests) <= most
    assert not [request for request in wire.requests if "x-amz-copy-source" in map(str.lower, request.headers)]
