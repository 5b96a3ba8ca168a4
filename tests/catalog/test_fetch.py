"""G2 for compressed chunks: read, verified, copied and exported, they are what was saved, or an error with a name."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from resilient.catalog.contents import read_manifest
from resilient.catalog.copy import copy
from resilient.catalog.export import export_safetensors
from resilient.catalog.fetch import decoded_nbytes, read_chunk, unpack
from resilient.catalog.line import read_line
from resilient.catalog.verify import verify
from resilient.clock import SYSTEM_CLOCK
from resilient.errors import CorruptError
from resilient.format.codec import BYTE_GROUPED_ZSTD, RAW
from resilient.format.documents import Commit
from resilient.store.memory import MemoryStore
from tests.catalog.runs import new_generation
from tests.catalog.sharing import State, commit, content_of, same, save_sharing


def a_state(*, moved: float = 0.0) -> State:
    rng = np.random.default_rng(0)
    return {
        "frozen": rng.standard_normal(5000, np.float32),
        "moving": rng.standard_normal(5000, np.float32) + np.float32(moved),
        "bits": rng.integers(0, 2**32, 2000, np.uint32).view(np.float32),  # does not shrink
    }


def a_run() -> tuple[MemoryStore, list[Commit]]:
    """Return a run whose second step refers to compressed chunks of the first one."""
    store = MemoryStore()
    claim = new_generation(store)
    base = save_sharing(store, claim, 1, a_state(), compress=True)
    first = commit(store, base)
    second = commit(store, save_sharing(store, claim, 2, a_state(moved=1.0), base, compress=True))
    return store, [first, second]


def test_compressed_chunks_come_back_bit_equal() -> None:
    store, commits = a_run()
    assert {chunk.codec for chunk in read_manifest(store, commits[1]).chunks} == {RAW, BYTE_GROUPED_ZSTD}
    assert same(content_of(store, commits[0]), a_state())
    assert same(content_of(store, commits[1]), a_state(moved=1.0))
    line = read_line(store)
    assert verify(store, line.commits, deep=True, line=line).ok


def test_raw_chunks_are_checked_in_place() -> None:
    store, commits = a_run()
    manifest = read_manifest(store, commits[0])
    (chunk,) = [chunk for chunk in manifest.chunks if chunk.codec == RAW]
    data = memoryview(bytearray(chunk.nbytes))
    read_chunk(store, manifest, chunk, data)
    assert unpack(manifest, chunk, data) is data


def test_a_flipped_bit_of_a_compressed_chunk_is_reported_with_object_tensor_and_rank() -> None:
    store, commits = a_run()
    manifest = read_manifest(store, commits[1])
    rng = random.Random(0)
    (number,) = [number for number, tensor in enumerate(manifest.tensors) if tensor.name == "frozen"]
    (chunk,) = [chunk for chunk in manifest.chunks if chunk.tensor == number]
    key = manifest.objects[chunk.object].key
    assert key == commits[0].attempt.data(0, 0), "it lies where the first step stored it"
    content = store.get(key)
    into = memoryview(bytearray(decoded_nbytes(manifest.tensors[number], chunk)))
    for place in [*range(40), *rng.sample(range(40, chunk.nbytes), 40)]:
        flipped = bytearray(content)
        flipped[chunk.start + place] ^= 1 << rng.randrange(8)
        store.put(key, [flipped])
        found = verify(store, [commits[1]], deep=True)
        if found.ok:  # zstd does not look at every bit
            read_chunk(store, manifest, chunk, into)
            assert bytes(into) == a_state()["frozen"].tobytes()
            continue
        assert [(bad.object, bad.tensor, bad.rank) for bad in found.bad] == [(key, "model.frozen", 0)]
        with pytest.raises(CorruptError, match=f"{key} .*'frozen'") as caught:
            read_chunk(store, manifest, chunk, into)
        assert caught.value.rank == 0


def test_a_copy_stays_compressed_and_needs_no_other_attempt() -> None:
    store, commits = a_run()
    there = MemoryStore()
    made = copy(store, commits[1], there, clock=SYSTEM_CLOCK)
    assert same(content_of(there, made), a_state(moved=1.0))
    assert made.nbytes == commits[1].nbytes
    assert set(there.list("data/")) == {made.attempt.data(0, 0)}
    line = read_line(there)
    assert verify(there, line.commits, deep=True, line=line).ok


def test_an_export_is_decoded(tmp_path: Path) -> None:
    store, commits = a_run()
    export_safetensors(store, read_manifest(store, commits[1]), tmp_path / "out")
    assert same(load_file(tmp_path / "out" / "model.safetensors"), a_state(moved=1.0))


def test_a_missing_object_of_an_earlier_attempt_is_named() -> None:
    store, commits = a_run()
    store.delete(commits[0].attempt.data(0, 0))
    with pytest.raises(CorruptError, match=commits[0].attempt.data(0, 0)):
        content_of(store, commits[1])
    found = verify(store, [commits[1]], deep=False)
    assert [(bad.step, bad.object) for bad in found.bad] == [(2, commits[0].attempt.data(0, 0))]
