"""G2: what is read from the nearest place is right, or is read from the store."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from resilient.catalog.line import read_line
from resilient.engine.peers import Peers
from resilient.engine.restore import load_into
from resilient.errors import NotFoundError
from resilient.events import Bus
from resilient.format.layout import Attempt
from resilient.format.receipts import decode_receipt, encode_receipt
from resilient.store.local import LocalStore
from resilient.store.memory import MemoryStore
from resilient.store.nearest import NearestStore, Shards
from resilient.writer.messages import Tiered
from tests.engine.rank_threads import SharedValues
from tests.writer.staging import state
from tests.writer.test_tiering import begin, close, order, tier


@pytest.fixture
def saved(tmp_path: Path) -> tuple[MemoryStore, LocalStore, str]:
    """Return a store and a tier that hold the same save, and the key of a data object."""
    store = MemoryStore()
    trainer = begin(store, tier(tmp_path))
    order(trainer, 1, stores=True)
    trainer.outcome(1)
    trainer.wait(Tiered, 1)
    close(trainer)
    here = LocalStore(tmp_path)
    return store, here, next(iter(here.list("data/")))


def read(store: NearestStore, key: str, start: int, nbytes: int) -> bytes:
    into = bytearray(nbytes)
    store.read_into(key, start, memoryview(into))
    return bytes(into)


def test_data_comes_from_the_tier_that_has_it(saved: tuple[MemoryStore, LocalStore, str]) -> None:
    store, here, key = saved
    expected = store.get(key)
    store.delete(key)
    nearest = NearestStore(store, [Shards("memory", here, notice=pytest.fail)])
    assert read(nearest, key, 100, 4096) == expected[100:4196]
    assert nearest.served == {(key, "memory"): 4096}


def test_data_that_no_tier_has_comes_from_the_store(saved: tuple[MemoryStore, LocalStore, str]) -> None:
    store, here, key = saved
    here.delete(key)
    nearest = NearestStore(store, [Shards("memory", here, notice=pytest.fail)])
    assert read(nearest, key, 0, 10) == store.get(key)[:10]
    assert nearest.served == {(key, store.url): 10}
    with pytest.raises(NotFoundError):
        read(nearest, key.replace("-0", "-9"), 0, 10)


def test_a_damaged_copy_is_removed_and_told_and_the_store_is_read(saved: tuple[MemoryStore, LocalStore, str]) -> None:
    store, here, key = saved
    content = bytearray(here.get(key))
    content[-1] ^= 1
    here.put(key, [content])
    told: list[str] = []
    nearest = NearestStore(store, [Shards("memory", here, notice=told.append)])
    assert read(nearest, key, 0, 10) == store.get(key)[:10], "although these bytes of the copy are right"
    assert nearest.served == {(key, store.url): 10}
    assert len(told) == 1
    assert key in told[0]
    assert key not in set(here.list("data/"))


def test_what_no_receipt_promises_is_not_read(saved: tuple[MemoryStore, LocalStore, str]) -> None:
    store, here, key = saved
    for receipt in list(here.list("steps/")):
        here.delete(receipt)
    nearest = NearestStore(store, [Shards("memory", here, notice=pytest.fail)])
    assert read(nearest, key, 0, 10) == store.get(key)[:10]
    assert nearest.served == {(key, store.url): 10}


def test_all_but_data_is_the_stores(saved: tuple[MemoryStore, LocalStore, str]) -> None:
    store, here, _ = saved
    nearest = NearestStore(store, [Shards("memory", here, notice=pytest.fail)])
    assert sorted(nearest.list("")) == sorted(store.list(""))
    assert nearest.create("control/x", b"1")
    nearest.put("control/y", [b"2"])
    assert (store.get("control/x"), nearest.get("control/y"), nearest.size("control/y")) == (b"1", b"2", 1)
    nearest.delete("control/x")
    assert "control/x" not in set(store.list(""))
    assert list(nearest.folders("")) == list(store.folders(""))
    assert nearest.url == store.url
    assert nearest.capabilities == store.capabilities


def test_what_is_not_what_the_checkpoint_names_comes_from_the_store(saved: tuple[MemoryStore, LocalStore, str]) -> None:
    store, here, key = saved
    nearest = NearestStore(store, [Shards("memory", here, notice=pytest.fail)])
    read(nearest, key, 0, 10)
    nearest.distrust(key)
    read(nearest, key, 0, 10)
    assert nearest.served == {(key, "memory"): 10, (key, store.url): 10}


def test_a_restore_asks_the_store_after_a_tier_had_another_state_under_the_same_name(
    saved: tuple[MemoryStore, LocalStore, str], tmp_path: Path
) -> None:
    store, here, _ = saved
    other = begin(MemoryStore(), tier(tmp_path / "other"))
    staged = other.staged(1, state(2))  # another state of the same step, whole and with a receipt of its own
    other.order(msgspec.structs.replace(staged, stores=False, tiers=True))
    other.wait(Tiered, 1)
    close(other)
    theirs, (commit,) = LocalStore(tmp_path / "other"), read_line(store).commits
    attempt, foreign = commit.attempt, Attempt(1, other.claim.generation, other.claim.nonce)
    receipt = decode_receipt(theirs.get(foreign.receipt(0)), "the receipt")
    objects = []
    for number, each in enumerate(receipt.objects):
        objects.append(msgspec.structs.replace(each, key=attempt.data(0, number)))
        here.put(objects[-1].key, [theirs.get(each.key)])
    renamed = msgspec.structs.replace(
        receipt, objects=tuple(objects), nonce=attempt.nonce, generation=attempt.generation
    )
    here.put(attempt.receipt(0), [encode_receipt(renamed)])

    nearest = NearestStore(store, [Shards("memory", here, notice=pytest.fail)])
    expected = state(1)
    into = {name: torch.zeros(array.shape, dtype=getattr(torch, str(array.dtype))) for name, array in expected.items()}
    load_into(nearest, {"model": {**into, "step": 0}}, Peers(0, 1, SharedValues()), commit, bus=Bus())
    for name, array in expected.items():
        assert into[name].numpy().tobytes() == array.tobytes(), name
