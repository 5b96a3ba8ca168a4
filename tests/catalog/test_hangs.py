from __future__ import annotations

import msgspec
import pytest

from resilient.catalog.hangs import keep_hang, read_hangs
from resilient.errors import CorruptError
from resilient.format import layout
from resilient.format.hangs import Hang, Worker, decode_hang, encode_hang
from resilient.store.memory import MemoryStore

HANG = Hang(
    generation=3,
    nonce="0123456789abcdef",
    rank=1,
    world_size=3,
    host="node-1",
    pid=77,
    found_by=0,
    step=12,
    section="save",
    age_s=61.5,
    timeout_s=60.0,
    silent_s=0.25,
    state="S",
    waits=0,
    signature="fsync < write (S)",
    created="2026-01-01T00:00:00.000Z",
    stacks="Current thread ...",
    workers=(Worker(pid=78, command="python", state="S", stacks="Thread ..."),),
)


def test_what_is_kept_of_each_rank_is_read_by_generation() -> None:
    store = MemoryStore("hangs")
    kept = [
        msgspec.structs.replace(HANG, rank=rank, generation=generation) for rank, generation in [(2, 3), (0, 3), (1, 4)]
    ]
    for each in kept:
        keep_hang(store, each)
    keep_hang(store, msgspec.structs.replace(HANG, rank=2, step=99))  # it went on, and hung again
    store.put(layout.hang(3, 1), [b"torn"])
    expected = [(0, 12), (2, 99)]
    assert [(each.rank, each.step) for each in read_hangs(store, 3)] == expected
    assert [each.rank for each in read_hangs(store, 3, but={0})] == [2]
    assert read_hangs(store, 5) == ()
    assert layout.parse_hang(layout.hang(3, 1)) == (3, 1)


def test_a_record_is_sealed() -> None:
    data = encode_hang(HANG)
    assert decode_hang(data, "it") == HANG
    with pytest.raises(CorruptError, match="it"):
        decode_hang(data.replace(b'"rank": 1', b'"rank": 2'), "it")
