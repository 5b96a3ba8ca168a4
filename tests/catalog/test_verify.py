"""G2: every flipped byte, and every object that is truncated, emptied or removed, is reported by the object's name."""

from __future__ import annotations

import random

import numpy as np
import pytest

from resilient.catalog.line import read_line
from resilient.catalog.verify import Verification, verify
from resilient.format.layout import Attempt
from resilient.store.memory import MemoryStore
from tests.catalog.runs import ReceiptMaker, attempt_of, commit_of, new_generation, save


def a_run() -> MemoryStore:
    """Return a run with two generations and three steps."""
    store = MemoryStore()
    claim = new_generation(store)
    save(store, claim, 1)
    save(store, claim, 2)
    save(store, new_generation(store, read_line(store).commits[0]), 3)
    return store


def verified(store: MemoryStore, *, deep: bool = True) -> Verification:
    line = read_line(store)
    return verify(store, line.commits, deep=deep, line=line)


def test_a_sound_run_is_sound_and_all_its_objects_are_looked_at() -> None:
    store = a_run()
    found = verified(store)
    assert found.ok
    assert found.checked == len(list(store.list("")))


def test_every_flipped_byte_is_reported_by_the_name_of_its_object() -> None:
    store = a_run()
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    for key in sorted(store.list("")):
        content = store.get(key)
        places = rng.sample(range(len(content)), min(6, len(content)))
        for place in {*places, 0, len(content) - 1}:
            flipped = bytearray(content)
            flipped[place] ^= 1 << rng.randrange(8)
            store.put(key, [flipped])
            found = verified(store)
            assert [bad.object for bad in found.bad] == [key], f"seed {seed}: byte {place}"
        store.put(key, [content])


@pytest.mark.parametrize("damage", ["truncated", "emptied", "removed"])
def test_every_object_that_is_damaged_as_a_whole_is_reported(damage: str) -> None:
    store = a_run()
    for key in sorted(store.list("")):
        content = store.get(key)
        if damage == "removed":
            store.delete(key)
        else:
            store.put(key, [content[:-1] if damage == "truncated" else b""])
        line = read_line(store)
        found = verify(store, line.commits, deep=False, line=line)
        if damage == "removed" and key.endswith("/COMMIT"):
            assert found.ok, "without its COMMIT the step is one that was never committed"
            assert [attempt.commit for attempt in line.uncommitted] == [key]
        elif damage == "removed" and (key.endswith(".newest.json") or "/marks/continued-" in key):
            assert found.ok, "a run that an earlier version has written has none"
        else:
            assert key in [bad.object for bad in found.bad]
        store.put(key, [content])


def test_a_damaged_chunk_is_reported_with_step_tensor_and_rank() -> None:
    store = a_run()
    key = read_line(store).commits[0].attempt.data(1, 0)
    content = bytearray(store.get(key))
    content[5] ^= 1
    store.put(key, [content])
    assert verified(store, deep=False).ok
    (bad,) = verified(store).bad
    assert (bad.step, bad.object, bad.tensor, bad.rank) == (3, key, "model.w", 1)
    assert "digest" in bad.why


def test_a_copy_that_no_manifest_needs_is_compared_all_the_same() -> None:
    store = MemoryStore()
    attempt = attempt_of(new_generation(store), 1)
    for rank in range(2):
        ReceiptMaker(attempt, rank, 2).tensor("w", np.ones(8)).write(store)
    commit_of(store, attempt)
    assert verified(store).ok
    store.put(attempt.data(1, 0), [bytes(64)])
    assert [(bad.object, bad.rank) for bad in verified(store).bad] == [(attempt.data(1, 0), 1)]


def test_a_checkpoint_that_is_deleted_meanwhile_is_not_bad() -> None:
    store = a_run()
    line = read_line(store)
    victim: Attempt = line.at(1).attempt
    store.create(victim.tombstone, b"")
    store.delete(victim.data(0, 0))
    store.delete(victim.commit)
    assert verify(store, line.commits, deep=True, line=line).ok


def test_progress_ends_with_all_bytes() -> None:
    store = a_run()
    line = read_line(store)
    seen: list[tuple[int, int]] = []
    verify(store, line.commits, deep=True, progress=lambda done, total: seen.append((done, total)))
    total = sum(commit.nbytes for commit in line.commits)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
