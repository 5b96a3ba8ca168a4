"""A trainer without torch: arrays staged in slots, and what its writer answers."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from resilient.catalog.contents import read_manifest
from resilient.catalog.fetch import read_chunk
from resilient.catalog.line import read_line
from resilient.format import values
from resilient.format.box import Box, split
from resilient.format.chunks import NOT_HERE
from resilient.format.documents import Claim, Item, Tensor, Value
from resilient.store.base import Store
from resilient.writer.link import WriterLink
from resilient.writer.messages import Answer, Committed, Failed, Open, Save, Structure
from resilient.writer.slot import Slot

Array = npt.NDArray[Any]
A = TypeVar("A")
TIMEOUT_S = 60.0


def opened(store: Store, claim: Claim, rank: int = 0, world_size: int = 1, **settings: Any) -> Open:
    """Return the first word to a writer of this rank."""
    known: dict[str, Any] = {"commit_timeout_s": 60.0, "compress": "off", "run_id": "a run", "options": {}}
    return Open(
        url=store.url,
        rank=rank,
        world_size=world_size,
        generation=claim.generation,
        nonce=claim.nonce,
        **(known | settings),
    )


@dataclass
class Trainer:
    """One rank: stages arrays (each rank stores those that it is given, and lists ``replicas``), hears answers."""

    claim: Claim
    slots: list[Slot] = field(default_factory=lambda: [Slot.create("test")])
    chunk_nbytes: int = 1 << 16
    object_nbytes: int = 1 << 30
    answers: list[Answer] = field(default_factory=list)
    link: WriterLink | None = None

    def __post_init__(self) -> None:
        self._news = threading.Condition()
        self._structures = 0

    def hear(self, answer: Answer) -> None:
        with self._news:
            self.answers.append(answer)
            self._news.notify_all()

    def wait(self, kind: type[A] | tuple[type[A], ...], step: int | None = None, timeout_s: float = TIMEOUT_S) -> A:
        """Return the first answer of this kind (about this step)."""
        end = time.monotonic() + timeout_s
        with self._news:
            while True:
                for each in self.answers:
                    if isinstance(each, kind) and step in (None, getattr(each, "step", None)):
                        return each
                assert time.monotonic() < end, f"no {kind} of step {step}: {self.answers}"
                self._news.wait(0.5)

    def outcome(self, step: int) -> Committed | Failed:
        """Return how a save ended."""
        answer = self.wait((Committed, Failed), step)
        assert isinstance(answer, Committed | Failed)
        return answer

    def has(self, link: Callable[[Callable[[Answer], None]], WriterLink]) -> WriterLink:
        """Give it a writer."""
        self.link = link(self.hear)
        self.link.wait_ready(TIMEOUT_S)
        return self.link

    def save(self, step: int, arrays: Mapping[str, Array], **how: Any) -> None:
        """Stage and order a save."""
        self.order(self.staged(step, arrays, **how))

    def order(self, save: Save) -> None:
        assert self.link is not None
        self.link.save(save)

    def staged(
        self,
        step: int,
        arrays: Mapping[str, Array],
        *,
        replicas: Mapping[str, Array] | None = None,
        slot: int = 0,
        new: bool = True,
    ) -> Save:
        """Fill a slot; return the order to save it. ``new`` describes the structure first."""
        assert self.link is not None
        if new:
            self._structures += 1
        structure, staged = structure_of(self, self._structures, arrays, replicas or {})
        if new:
            self.link.define(structure)
        into = self.slots[slot]
        into.grow(max((at + len(data) for at, data in staged), default=0))
        into.begin(generation=self.claim.generation, step=step)
        for at, data in staged:
            into.payload[at : at + len(data)] = data
        stamp = into.seal()
        value = Value("model", "step", ("step",), values.encode(step))
        return Save(
            structure=self._structures, slot=slot, sequence=stamp.sequence, step=step, reason="test", values=(value,)
        )


def structure_of(
    trainer: Trainer, number: int, arrays: Mapping[str, Array], replicas: Mapping[str, Array]
) -> tuple[Structure, list[tuple[int, bytes]]]:
    """Return how arrays are placed, wide elements first, and the bytes of each place."""
    names = ("tensor", "object", "start", "nbytes", "at", "offset", "size")
    columns: dict[str, list[int]] = {name: [] for name in names}
    objects: list[tuple[int, int]] = []
    staged: list[tuple[int, bytes]] = []
    ordered = [*sorted(arrays.items(), key=lambda each: -each[1].itemsize), *replicas.items()]
    at = nbytes = 0  # of the object being filled
    for index, (name, array) in enumerate(ordered):
        whole = Box.whole(array.shape)
        for box in split(whole, array.itemsize, trainer.chunk_nbytes):
            data = np.ascontiguousarray(array[box.relative_to(whole)]).tobytes()
            if nbytes and (nbytes + len(data) > trainer.object_nbytes or name in replicas):
                objects.append((at, nbytes))
                at, nbytes = -(-(at + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE, 0
            place = at + sum(len(each) for where, each in staged if where >= at)
            columns["tensor"].append(index)
            columns["object"].append(NOT_HERE if name in replicas else len(objects))
            columns["start"].append(0 if name in replicas else nbytes)
            columns["nbytes"].append(len(data))
            columns["at"].append(place)
            columns["offset"].extend(box.offset)
            columns["size"].extend(box.size)
            staged.append((place, data))
            nbytes += 0 if name in replicas else len(data)
    if nbytes:
        objects.append((at, nbytes))
    structure = Structure(
        number=number,
        items=(Item("model", "mapping"),),
        tensors=tuple(Tensor("model", name, (name,), str(array.dtype), array.shape) for name, array in ordered),
        objects=tuple(objects),
        **{name: np.array(column, "<i8").tobytes() for name, column in columns.items()},
    )
    return structure, staged


def restored(store: Store, step: int) -> dict[str, Array]:
    """Read a checkpoint back, every byte verified."""
    manifest = read_manifest(store, read_line(store).at(step))
    arrays = {each.name: np.zeros(each.shape, each.dtype) for each in manifest.tensors}
    for chunk in manifest.chunks:
        tensor = manifest.tensors[chunk.tensor]
        size = int(np.prod(chunk.size, dtype=np.int64))
        data = bytearray(size * arrays[tensor.name].itemsize)
        read_chunk(store, manifest, chunk, memoryview(data))
        place = chunk.box.relative_to(Box.whole(tensor.shape))
        arrays[tensor.name][place] = np.frombuffer(data, tensor.dtype).reshape(chunk.size)
    return arrays


def is_step(store: Store, step: int, expected: Mapping[str, Array]) -> None:
    """Fail unless the checkpoint of a step holds exactly these arrays."""
    found = restored(store, step)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name


def state(seed: int, nbytes: int = 1 << 20) -> dict[str, Array]:
    """Return arrays of several widths, about so many bytes in all."""
    draw = np.random.default_rng(seed)
    return {
        "big": draw.standard_normal((max(1, nbytes // 16 // 8), 16)).astype(np.float32),
        "wide": draw.standard_normal(nbytes // 16).astype(np.float64),
        "bytes": draw.integers(0, 255, 1001, np.uint8),
        "scalar": np.array(seed, np.int64),
    }
