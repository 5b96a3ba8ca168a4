"""Incremental saves made by hand: one rank, a few tensors, what is unchanged lies in an earlier attempt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from resilient.catalog.commit import write_receipt
from resilient.catalog.contents import read_manifest
from resilient.catalog.fetch import decoded_nbytes, read_chunk
from resilient.catalog.references import refer
from resilient.format.chunks import Chunk, Chunks
from resilient.format.codec import BYTE_GROUPED_ZSTD, RAW, encode
from resilient.format.digest import digest
from resilient.format.documents import Claim, Commit, Item, Object, Receipt, Tensor
from resilient.format.layout import Attempt
from resilient.store.base import Store
from tests.catalog.runs import attempt_of, commit_of

State = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a later save may refer to."""

    attempt: Attempt
    receipt: Receipt


def a_state(step: int, *, frozen: int = 0) -> State:
    """Return a state of which all but ``moving`` depends on ``frozen`` alone."""
    return {
        "frozen": np.arange(64, dtype=np.float32) + frozen,
        "moving": np.arange(16, dtype=np.float32) * step,
    }


def save_sharing(
    store: Store,
    claim: Claim,
    step: int,
    state: State,
    base: Saved | None = None,
    *,
    through: Attempt | None = None,
    compress: bool = False,
) -> Saved:
    """Make a save durable up to its receipt: what ``base`` has with the same digest is referred to, if it may be."""
    attempt = attempt_of(claim, step)
    shared = _chunks_by_name(base) if base is not None and refer(store, base.attempt, attempt, through) else {}
    tensors = [Tensor("model", name, (name,), "float32", full.shape) for name, full in state.items()]
    chunks: list[Chunk] = []
    parts: list[bytes] = []
    objects = [Object(attempt.data(0, 0), 0)]
    for number, (name, full) in enumerate(state.items()):
        raw = full.tobytes()
        where = shared.get(name)
        if base is not None and where is not None and where.digest == digest(raw):
            object_, start, nbytes, codec = 1, where.start, where.nbytes, where.codec
            objects[1:] = [base.receipt.objects[where.object]]
        else:
            short = encode(memoryview(raw), 4, 1) if compress else None
            object_, start, codec = 0, sum(map(len, parts)), RAW if short is None else BYTE_GROUPED_ZSTD
            parts.append(raw if short is None else short)
            nbytes = len(parts[-1])
        chunks.append(Chunk(number, (0,), full.shape, object_, start, nbytes, digest(raw), codec))
    store.put(objects[0].key, parts)
    objects[0] = Object(objects[0].key, sum(map(len, parts)))
    receipt = Receipt(
        step=step,
        generation=attempt.generation,
        nonce=attempt.nonce,
        rank=0,
        world_size=1,
        items=(Item("model", "mapping"),),
        tensors=tuple(tensors),
        objects=tuple(objects),
        chunks=Chunks.of(chunks),
        values=(),
    )
    write_receipt(store, receipt)
    return Saved(attempt=attempt, receipt=receipt)


def commit(store: Store, saved: Saved) -> Commit:
    outcome = commit_of(store, saved.attempt, world_size=1)
    assert isinstance(outcome, Commit)
    return outcome


def content_of(store: Store, found: Commit) -> State:
    """Return the state that a checkpoint holds, verified as a restore does."""
    manifest = read_manifest(store, found)
    state = {}
    for chunk in manifest.chunks:
        tensor = manifest.tensors[chunk.tensor]
        data = bytearray(decoded_nbytes(tensor, chunk))
        read_chunk(store, manifest, chunk, memoryview(data))
        state[tensor.name] = np.frombuffer(data, np.float32)
    return state


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def _chunks_by_name(saved: Saved) -> dict[str, Chunk]:
    return {saved.receipt.tensors[chunk.tensor].name: chunk for chunk in saved.receipt.chunks}
