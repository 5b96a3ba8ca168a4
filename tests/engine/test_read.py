"""Whatever lies where in the store, a target gets its elements, and only bytes that were compared with their digest."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Final

import pytest
import torch

from resilient.engine.read import fill
from resilient.engine.read_plan import plan_reads
from resilient.errors import CorruptError, ErrorKind
from resilient.format import codec
from resilient.format.box import Box, split
from resilient.format.chunks import Chunk, Chunks
from resilient.format.digest import digest
from resilient.format.documents import Manifest, Object, Tensor
from resilient.state.prepare import Target
from resilient.state.tensors import dtype_name
from resilient.store.base import Capabilities
from resilient.store.memory import MemoryStore

DTYPES: Final = (torch.float32, torch.bfloat16, torch.int8, torch.float64)
PAGE: Final = 4096
CASES: Final = 40


class Stored:
    """Tensors cut into chunks, in some order in some objects, with gaps, some of them encoded."""

    def __init__(self, draw: random.Random) -> None:
        self.store = MemoryStore()
        self.capabilities = Capabilities(
            conditional_create=True,
            atomic_put=True,
            ranged_read=True,
            request_nbytes=draw.choice([300, 5000, 20_000]),
            unit_nbytes=draw.choice([1, 1, PAGE]),
        )
        self.store.capabilities = self.capabilities
        self.full = [self._values(draw) for _ in range(draw.randint(1, 6))]
        self.tensors = tuple(
            Tensor("item", f"t{number}", (f"t{number}",), dtype_name(each.dtype), tuple(each.shape))
            for number, each in enumerate(self.full)
        )
        self.bodies = [bytearray() for _ in range(draw.randint(1, 3))]
        self.chunks: list[Chunk] = []
        boxes = [
            (number, box)
            for number, each in enumerate(self.full)
            for box in split(Box.whole(each.shape), each.itemsize, draw.choice([64, 1000, 50_000]))
        ]
        if draw.random() < 0.5:
            draw.shuffle(boxes)
        for number, box in boxes:
            self._store(draw, number, box)
        for number, body in enumerate(self.bodies):
            self.store.put(f"data/{number}", [body])

    @staticmethod
    def _values(draw: random.Random) -> torch.Tensor:
        shape = [draw.randint(1, 12) for _ in range(draw.randint(0, 3))]
        if shape and draw.random() < 0.4:
            shape[0] *= 100
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        return torch.randint(-100, 100, shape, generator=generator).to(draw.choice(DTYPES))

    def _store(self, draw: random.Random, number: int, box: Box) -> None:
        tensor = self.full[number][box.relative_to(Box.whole(self.full[number].shape))]
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        packed = codec.encode(memoryview(raw), tensor.itemsize, 1) if draw.random() < 0.5 else None
        part = draw.randrange(len(self.bodies))
        body = self.bodies[part]
        body += bytes(draw.choice([0, 0, 0, 3, 5000]))
        stored = raw if packed is None else packed
        self.chunks.append(
            Chunk(
                number,
                box.offset,
                box.size,
                part,
                len(body),
                len(stored),
                digest(raw),
                codec.RAW if packed is None else codec.BYTE_GROUPED_ZSTD,
            )
        )
        body += stored

    @property
    def manifest(self) -> Manifest:
        return manifest_of(self.tensors, [len(body) for body in self.bodies], self.chunks)

    def target(self, draw: random.Random) -> Target:
        """Return a box of a tensor, or all of it, to be read into memory of any strides."""
        tensor = draw.choice(self.tensors)
        ends = [sorted(draw.sample(range(extent + 1), 2)) for extent in tensor.shape]
        box = Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))
        if draw.random() < 0.6:
            box = Box.whole(tensor.shape)
        like = self.full[self.tensors.index(tensor)]
        into = torch.full(box.size, 77).to(like.dtype)
        if draw.random() < 0.3:  # neighbors lie two apart
            into = torch.stack([into, into], dim=-1)[..., 1]
        return Target(tensor=tensor, box=box, into=into)

    def expected(self, target: Target) -> torch.Tensor:
        whole = self.full[self.tensors.index(target.tensor)]
        return whole[target.box.relative_to(Box.whole(whole.shape))]


@pytest.mark.parametrize("seed", range(CASES))
def test_every_target_gets_its_elements(seed: int) -> None:
    draw = random.Random(seed)
    stored = Stored(draw)
    targets = [stored.target(draw) for _ in range(draw.randint(1, 8))]
    versions = [target.into._version for target in targets]
    nbytes = fill(stored.store, stored.manifest, targets)
    for target, version in zip(targets, versions, strict=True):
        assert torch.equal(target.into, stored.expected(target))
        assert target.into._version > version, "autograd must see that the values are others now"
    assert nbytes <= sum(len(body) for body in stored.bodies) + 2 * PAGE * len(stored.chunks)


@pytest.mark.parametrize("seed", range(CASES))
def test_requests_are_bounded_and_read_little_that_nobody_wants(seed: int) -> None:
    draw = random.Random(seed)
    stored = Stored(draw)
    targets = [stored.target(draw) for _ in range(draw.randint(1, 8))]
    plan = plan_reads(stored.manifest, targets, stored.capabilities)
    assert sorted(row for span in plan.spans for row in range(span.first, span.end)) == list(range(len(plan.rows)))
    for span in plan.spans:
        wanted = plan.nbytes[span.first : span.end]
        most = stored.capabilities.request_nbytes + 2 * (stored.capabilities.unit_nbytes - 1)
        assert span.nbytes <= most or len(wanted) == 1
        assert span.nbytes <= sum(wanted) + PAGE * (len(wanted) + 1)
        object_nbytes = len(stored.bodies[int(plan.rows.places.object[span.first])])
        assert 0 <= span.start <= span.start + span.nbytes <= object_nbytes
        assert span.start % stored.capabilities.unit_nbytes == 0


@pytest.mark.parametrize("seed", range(CASES))
def test_one_changed_byte_of_what_is_read_is_noticed_and_named(seed: int) -> None:
    draw = random.Random(seed)
    stored = Stored(draw)
    chunk = draw.choice(stored.chunks)
    tensor = stored.tensors[chunk.tensor]
    body = stored.bodies[chunk.object]
    body[chunk.start + draw.randrange(chunk.nbytes)] ^= 1 << draw.randrange(8)
    stored.store.put(f"data/{chunk.object}", [body])
    into = torch.zeros_like(stored.full[chunk.tensor])
    with pytest.raises(CorruptError, match=f"data/{chunk.object}.*'{tensor.name}'"):
        fill(stored.store, stored.manifest, [Target(tensor=tensor, box=Box.whole(tensor.shape), into=into)])


def test_a_hole_is_found_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    stored = Stored(draw)
    missing = stored.chunks.pop(draw.randrange(len(stored.chunks)))
    monkeypatch.setattr(stored.store, "read_into", lambda *_: pytest.fail("it was read"))
    tensor = stored.tensors[missing.tensor]
    left = math.prod(tensor.shape) - missing.box.volume
    target = Target(tensor=tensor, box=Box.whole(tensor.shape), into=torch.zeros_like(stored.full[missing.tensor]))
    with pytest.raises(CorruptError, match=f"{tensor.name}: the manifest lists {left} of") as caught:
        fill(stored.store, stored.manifest, [target])
    assert caught.value.kind is ErrorKind.INCOMPLETE


def test_after_a_failure_no_further_read_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    monkeypatch.setattr(store, "capabilities", replace(store.capabilities, request_nbytes=1000))
    chunks = [Chunk(0, (row * 250,), (250,), 0, row * 1000, 1000, bytes(16)) for row in range(200)]
    tensor = Tensor("item", "t", ("t",), "float32", (50_000,))
    store.put("data/0", [bytes(200_000)])
    reads: list[int] = []
    read_into = store.read_into

    def count(key: str, start: int, into: memoryview) -> None:
        reads.append(start)
        read_into(key, start, into)

    monkeypatch.setattr(store, "read_into", count)
    target = Target(tensor=tensor, box=Box.whole((50_000,)), into=torch.zeros(50_000))
    with pytest.raises(CorruptError):
        fill(store, manifest_of((tensor,), [200_000], chunks), [target])
    assert len(reads) < 50


def manifest_of(tensors: tuple[Tensor, ...], objects: list[int], chunks: list[Chunk]) -> Manifest:
    return Manifest(
        step=1,
        generation=1,
        nonce="0" * 16,
        world_size=1,
        items=(),
        tensors=tensors,
        objects=tuple(Object(f"data/{number}", nbytes) for number, nbytes in enumerate(objects)),
        chunks=Chunks.of(chunks),
        values=(),
        receipts=(),
    )
