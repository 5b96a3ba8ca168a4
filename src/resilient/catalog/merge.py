"""Whether the receipts of all ranks describe one whole state, and the manifest that says so."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from resilient.catalog.coverage import cover
from resilient.catalog.explaining import why_wrong
from resilient.catalog.names import Numbers, Ranks, check_owner, merge_items, merge_tensors, merge_values
from resilient.catalog.refusals import title
from resilient.catalog.rows import Rows
from resilient.errors import ConflictError, ErrorKind
from resilient.format.chunks import NOT_HERE, Boxes, Chunks, Column
from resilient.format.digest import digest
from resilient.format.documents import Manifest, Object, ReceiptRef, Tensor, Value
from resilient.format.dtypes import ITEMSIZE
from resilient.format.layout import Attempt
from resilient.format.manifests import arranged, tally
from resilient.format.receipts import (
    OWN,
    PackedReceipt,
    Structure,
    unpack_chunks_of,
    unpack_structure,
    unpack_values,
    unseal_receipt,
)

_BATCH_ROWS: Final = 1 << 18
_RADIX_BITS: Final = 16
_TABLES_AT_ONCE: Final = 32
"""Of receipts: a table of a thousand rows is read in the time of the calls that it takes, so those are for several."""
_Numbers: TypeAlias = npt.NDArray[np.int64]
_Rows: TypeAlias = npt.NDArray[np.int32]
"""Numbers of rows: in 32 bits, for there are several lists of all of them."""


class Merge:
    """Takes the receipts of all ranks one after another, and keeps of each what a manifest is made of.

    Time is linear in the number of chunks, but for sorting them; memory too, at about seventy bytes a chunk.
    """

    def __init__(self, attempt: Attempt, world_size: int) -> None:
        self._attempt = attempt
        self._world_size = world_size
        self._rows = Rows(world_size)
        self._structures: dict[bytes, int] = {}
        self._decoded: list[Structure] = []
        self._structure_of: list[int] = []
        self._compared: set[tuple[int, bytes]] = set()
        self._values: list[Sequence[Value]] = []
        self._objects: list[Object] = []
        self._object_from = [0]
        self._receipts: list[ReceiptRef] = []
        self._waiting: list[tuple[PackedReceipt, str]] = []

    def add(self, data: bytes, where: str) -> None:
        """Take the receipt of the next rank, as it is stored.

        Raises:
            ConflictError: it is not that rank's of this attempt.
            CorruptError: it is not what was written; ``where`` is named.
        """
        receipt = unseal_receipt(data, where)
        self._check_belongs(receipt, where)
        which = self._structures.setdefault(receipt.structure, len(self._structures))
        if which == len(self._decoded):
            self._decoded.append(unpack_structure(receipt, where))
        structure = self._decoded[which]
        # Shared values that were compared once, in equal bytes, need not be looked at again.
        known = (which, receipt.shared) in self._compared
        self._compared.add((which, receipt.shared))
        self._values.append(unpack_values(receipt, structure, where, only_own=known))
        self._structure_of.append(which)
        self._objects.extend(receipt.objects)
        self._object_from.append(len(self._objects))
        self._receipts.append(ReceiptRef(receipt.rank, digest(data)))
        self._waiting.append((receipt, where))
        if len(self._waiting) == _TABLES_AT_ONCE:
            self._unpack()

    def manifest(self) -> Manifest:
        """Return the manifest, having proven that it is complete and free of contradictions; nothing is kept.

        Complete: one receipt of each rank; every element of every tensor lies in a stored chunk; every per-rank item
        is there for every rank, unless it can be derived. Free of contradictions: what several ranks describe, they
        describe alike; replicas with digests have equal ones; chunks overlap only where they are equal (of those, the
        lowest rank's copy counts); a box that a rank only holds is a union of chunks.

        Raises:
            ConflictError: kind ``divergent`` or ``incomplete``; it names item, tensor and ranks.
        """
        if len(self._receipts) != self._world_size:
            raise ConflictError(
                f"{self._attempt}: {self._world_size} receipts are wanted, one of each rank", kind=ErrorKind.INCOMPLETE
            )
        self._unpack()
        ranks = Ranks(structures=self._decoded, structure_of=self._structure_of)
        items = merge_items(ranks)
        numbers = merge_tensors(ranks, items)
        for structure, rank in zip(ranks.structures, ranks.first(), strict=True):
            for slot in structure.values:
                check_owner(slot, rank, items)
        chunks = self._rows.pop(self._counting(numbers))
        return Manifest(
            step=self._attempt.step,
            generation=self._attempt.generation,
            nonce=self._attempt.nonce,
            world_size=self._world_size,
            items=tuple(items.values()),
            tensors=tuple(numbers.tensors),
            objects=tuple(self._objects),
            chunks=chunks,
            values=merge_values(self._values),
            receipts=tuple(self._receipts),
        )

    def _unpack(self) -> None:
        """Take the chunks of the receipts that wait for it."""
        if self._waiting:
            self._rows.append(*unpack_chunks_of(self._waiting))
            self._waiting.clear()

    def _check_belongs(self, receipt: PackedReceipt, where: str) -> None:
        rank, world_size, attempt = len(self._receipts), self._world_size, self._attempt
        if (receipt.attempt, receipt.rank, receipt.world_size) != (attempt, rank, world_size):
            raise ConflictError(
                f"{where} is of rank {receipt.rank} of {receipt.world_size} for {receipt.attempt}; "
                f"rank {rank} of {world_size} for {attempt} is wanted",
                kind=ErrorKind.DIVERGENT,
                hint="all ranks of a job must save with the same world size",
                rank=rank,
            )

    def _counting(self, numbers: Numbers) -> _Rows:
        """Return the rows of the copies that count, as they are stored, having proven that they cover all tensors."""
        volumes = np.array([math.prod(tensor.shape) for tensor in numbers.tensors], np.int64)
        keys = self._renumber(numbers, np.cumsum(volumes) - volumes)
        aliases = _check_aliases(numbers.tensors)
        volumes[aliases] = 0
        chunks = self._rows.all()
        counts, order = _by_tensor(chunks.boxes.tensor, keys >= 0, len(volumes))
        counting, tallied = [np.empty(0, np.int32)], [np.empty((0, 2), np.int64)]
        for first, end, rows in _batches(counts, order):
            covered = cover(chunks, *_by_key(rows, keys[rows]), first, volumes[first:end])
            for number in covered.wrong.tolist():
                self._explain(numbers.tensors[number], number, chunks)
            counting.append(covered.rows.astype(np.int32))
            tallied.append(tally(covered.parts, first, end - first))
        del keys, order, chunks
        return np.concatenate(counting)[arranged(np.concatenate(tallied))]

    def _renumber(self, numbers: Numbers, base: _Numbers) -> _Numbers:
        """Number tensors and objects as the manifest does; return the number of each row's first element.

        Elements are numbered through all tensors (``base`` is that of a tensor's first one), so that the order of
        these numbers is that of tensors and offsets. Rows without elements have -1.
        """
        keys = np.empty(len(self._rows), np.int64)
        sizes = np.array([each.nbytes for each in self._objects], np.int64)
        forms = [_Forms(structure.tensors) for structure in self._decoded]
        for rank, which in enumerate(self._structure_of):
            chunks = self._rows.rank(rank)
            begin, end = self._object_from[rank : rank + 2]
            form = forms[which].of(chunks.boxes.tensor)
            volume = chunks.boxes.volume
            wrong = form.first_unsound(chunks, volume, sizes[begin:end])
            if wrong is not None:
                raise _cannot_be(self._decoded[which], rank, chunks, wrong, end - begin)
            boxes, places = chunks.boxes, chunks.places
            tensor = numbers.of_rank(rank, which)[boxes.tensor]
            part = keys[self._rows.starts[rank] : self._rows.starts[rank + 1]]
            np.add(base[tensor], form.first_element(boxes), out=part)
            part[volume == 0] = -1
            boxes.tensor[:] = tensor
            places.object[places.object != NOT_HERE] += begin
        return keys

    def _explain(self, tensor: Tensor, number: int, chunks: Chunks) -> None:
        rows = np.flatnonzero(chunks.boxes.tensor == number)
        ranks = np.searchsorted(self._rows.starts, rows, "right") - 1
        error = why_wrong(tensor, chunks.take(rows), ranks.tolist())
        assert error is not None, f"{tensor.name!r} is wrong, but not if one looks closely"
        raise error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Form:
    """What is said of the tensor of each row; ``known``: it is one that may have rows.

    ``shape`` and ``stride``: of each dimension, a column; dimensions that a tensor does not have are of one element.
    """

    known: npt.NDArray[np.bool_]
    ndim: Column
    itemsize: _Numbers
    shape: Sequence[_Numbers]
    stride: Sequence[_Numbers]

    def first_unsound(self, chunks: Chunks, volume: _Numbers, objects: _Numbers) -> int | None:
        """Return the first row that cannot be true, so that no reader has to doubt what a manifest says.

        ``volume`` is that of the boxes; ``objects`` are the sizes of the objects that the rows may name.
        """
        boxes, places = chunks.boxes, chunks.places
        sound = self.known & (boxes.ndim == self.ndim)
        for axis, shape in enumerate(self.shape[: boxes.offset.shape[1]]):
            offset, size = boxes.offset[:, axis], boxes.size[:, axis]
            sound &= ((offset | size) >= 0) & (offset <= shape - size)
        sound &= np.where(places.codec == 0, volume * self.itemsize == places.nbytes, places.nbytes >= 0)
        named = (places.object >= NOT_HERE) & (places.object < len(objects))
        sound &= named
        if len(objects):
            nbytes = objects[places.object if named.all() else np.where(named, places.object, NOT_HERE)]
            fits = (places.start >= 0) & (places.start <= nbytes - places.nbytes) & places.digested
            sound &= fits | (places.object == NOT_HERE)
        return None if sound.all() else int(np.argmin(sound))

    def first_element(self, boxes: Boxes) -> _Numbers:
        """Return the number of each row's first element within its tensor, in row-major order."""
        within = np.zeros(len(boxes), np.int64)
        for axis, stride in enumerate(self.stride[: boxes.offset.shape[1]]):
            within += boxes.offset[:, axis] * stride
        return within


class _Forms:
    """What a structure says of the form of its tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._ndim = np.array([len(tensor.shape) for tensor in tensors], np.int64)
        self._shape = np.ones((len(tensors), int(self._ndim.max(initial=0))), np.int64)
        for row, tensor in enumerate(tensors):
            self._shape[row, : self._ndim[row]] = tensor.shape
        # Rows of more dimensions than any tensor has are compared too, before they are refused.
        self._stride = np.ones_like(self._shape)
        self._stride[:, :-1] = np.cumprod(self._shape[:, :0:-1], axis=1)[:, ::-1]
        self._itemsize = np.array([ITEMSIZE[tensor.dtype] for tensor in tensors], np.int64)
        self._stored = np.array([tensor.alias is None for tensor in tensors], bool)
        self._last: tuple[_Rows, _Form] | None = None

    def of(self, tensor: _Rows) -> _Form:
        """Return what is said of the tensor of each row; most ranks ask of the same ones, which are looked up once."""
        if self._last is None or not np.array_equal(self._last[0], tensor):
            self._last = tensor.copy(), self._look_up(tensor)
        return self._last[1]

    def _look_up(self, tensor: _Rows) -> _Form:
        tensors = len(self._ndim)
        if not tensors:
            none = np.zeros(len(tensor), np.int64)
            return _Form(known=none > 0, ndim=none, itemsize=none, shape=(), stride=())
        known = (tensor >= 0) & (tensor < tensors)
        number = np.where(known, tensor, 0)
        return _Form(
            known=known & self._stored[number],
            ndim=self._ndim[number],
            itemsize=self._itemsize[number],
            shape=[column[number] for column in self._shape.T],
            stride=[column[number] for column in self._stride.T],
        )


def _by_tensor(tensor: npt.NDArray[np.int32], full: npt.NDArray[np.bool_], tensors: int) -> tuple[_Numbers, _Rows]:
    """Return how many of the rows that are ``full`` each of so many tensors has, and those rows by tensor, in order."""
    rows = np.arange(len(tensor), dtype=np.int32) if full.all() else np.flatnonzero(full).astype(np.int32)
    number = tensor[rows]
    for shift in range(0, tensors.bit_length(), _RADIX_BITS):  # numpy sorts numbers of 16 bits in linear time
        order = np.argsort((number >> shift).astype(np.uint16), kind="stable")
        rows, number = rows[order], number[order]
    return np.bincount(number, minlength=tensors), rows


def _by_key(rows: _Rows, keys: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Return rows in the order of their keys, and the keys; mostly ranks hold their parts in the order of parts."""
    if not (keys[1:] >= keys[:-1]).all():
        order = np.argsort(keys, kind="stable")
        rows, keys = rows[order], keys[order]
    return rows.astype(np.int64), keys


def _batches(counts: _Numbers, order: _Rows) -> Iterator[tuple[int, int, _Rows]]:
    """Cut rows, ordered by tensor, into those of whole tensors, not too many at a time; yield tensors and rows."""
    ends = np.cumsum(counts)
    first = 0
    while first < len(counts):
        before = int(ends[first - 1]) if first else 0
        end = max(first + 1, int(np.searchsorted(ends, before + _BATCH_ROWS, "right")))
        yield first, end, order[before : int(ends[end - 1])]
        first = end


def _check_aliases(tensors: Sequence[Tensor]) -> list[int]:
    """Return the numbers of the tensors that share another one's storage, having seen that the other one is there."""
    holding = {(tensor.item, tensor.name, tensor.rank) for tensor in tensors if tensor.alias is None}
    aliases = [number for number, tensor in enumerate(tensors) if tensor.alias is not None]
    for number in aliases:
        tensor = tensors[number]
        if (tensor.item, tensor.alias, tensor.rank) not in holding:
            raise ConflictError(
                f"{title(tensor, tensor.rank)} shares the storage of {tensor.alias!r}, which is not saved",
                kind=ErrorKind.INCOMPLETE,
            )
    return aliases


def _cannot_be(structure: Structure, rank: int, chunks: Chunks, row: int, objects: int) -> ConflictError:
    chunk = chunks[row]
    if not 0 <= chunk.tensor < len(structure.tensors) or not NOT_HERE <= chunk.object < objects:
        message = f"the receipt of rank {rank} names a tensor or an object that it does not list"
        return ConflictError(message, kind=ErrorKind.DIVERGENT, rank=rank)
    tensor = structure.tensors[chunk.tensor]
    whose = rank if tensor.rank == OWN else tensor.rank
    message = f"{title(tensor, whose)}: rank {rank} describes a part that cannot be: {chunk}"
    return ConflictError(message, kind=ErrorKind.DIVERGENT, rank=rank)
