"""Whether the receipts of all ranks describe one whole state, and the manifest that says so."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from resilient.catalog.coverage import cover
from resilient.catalog.explaining import why_wrong
from resilient.catalog.names import Numbers, Ranks, check_owner, merge_items, merge_tensors, merge_values
from resilient.catalog.refusals import title
from resilient.catalog.rows import Rows
from resilient.errors import ConflictError, ErrorKind
from resilient.format.chunks import NOT_HERE, Chunks
from resilient.format.digest import digest
from resilient.format.documents import Manifest, Object, ReceiptRef, Tensor, Value
from resilient.format.dtypes import ITEMSIZE
from resilient.format.layout import Attempt
from resilient.format.manifests import arranged, tally
from resilient.format.receipts import (
    OWN,
    PackedReceipt,
    Structure,
    unpack_chunks,
    unpack_structure,
    unpack_values,
    unseal_receipt,
)

_BATCH_ROWS: Final = 1 << 18
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
        self._rows.append(unpack_chunks(receipt, where))

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
        full = keys >= 0
        counts = np.bincount(chunks.boxes.tensor[full], minlength=len(volumes))
        del full
        order = np.argsort(keys)[len(keys) - int(counts.sum()) :].astype(np.int32)
        counting, tallied = [np.empty(0, np.int32)], [np.empty((0, 2), np.int64)]
        for first, end, rows in _batches(counts, order):
            covered = cover(chunks, rows.astype(np.int64), keys[rows], first, volumes[first:end])
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
        forms = [_Forms.of(structure.tensors) for structure in self._decoded]
        for rank, which in enumerate(self._structure_of):
            chunks = self._rows.rank(rank)
            begin, end = self._object_from[rank : rank + 2]
            wrong = forms[which].first_unsound(chunks, sizes[begin:end])
            if wrong is not None:
                raise _cannot_be(self._decoded[which], rank, chunks, wrong, end - begin)
            boxes, places = chunks.boxes, chunks.places
            tensor = numbers.of_rank(rank, which)[boxes.tensor]
            within = forms[which].first_element(chunks)
            part = keys[self._rows.starts[rank] : self._rows.starts[rank + 1]]
            part[:] = np.where(boxes.empty, -1, base[tensor] + within)
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
class _Forms:
    """What a structure says of the form of its tensors; shapes are filled up with dimensions of one element."""

    shape: _Numbers
    stride: _Numbers
    ndim: _Numbers
    itemsize: _Numbers
    alias: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Self:
        ndim = np.array([len(tensor.shape) for tensor in tensors], np.int64)
        shape = np.ones((len(tensors), int(ndim.max(initial=0))), np.int64)
        for row, tensor in enumerate(tensors):
            shape[row, : ndim[row]] = tensor.shape
        # Rows of more dimensions than any tensor has are compared too, before they are refused.
        stride = np.ones_like(shape)
        stride[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
        return cls(
            shape=shape,
            stride=stride,
            ndim=ndim,
            itemsize=np.array([ITEMSIZE[tensor.dtype] for tensor in tensors], np.int64),
            alias=np.array([tensor.alias is not None for tensor in tensors], bool),
        )

    def first_unsound(self, chunks: Chunks, objects: _Numbers) -> int | None:
        """Return the first row that cannot be true, so that no reader has to doubt what a manifest says.

        ``objects`` are the sizes of the objects that the rows may name.
        """
        boxes, places = chunks.boxes, chunks.places
        named = (boxes.tensor >= 0) & (boxes.tensor < len(self.ndim))
        named &= (places.object >= NOT_HERE) & (places.object < len(objects))
        tensor, object_ = boxes.tensor, places.object
        if not named.all():
            tensor, object_ = np.where(named, tensor, 0), np.where(named, object_, NOT_HERE)
        if not len(self.ndim):
            return 0 if len(chunks) else None
        sound = named & (boxes.ndim == self.ndim[tensor]) & ~self.alias[tensor]
        width = min(boxes.offset.shape[1], self.shape.shape[1])
        for axis in range(width):
            offset, size = boxes.offset[:, axis], boxes.size[:, axis]
            sound &= (offset >= 0) & (size >= 0) & (offset <= self.shape[tensor, axis] - size)
        plain = boxes.volume * self.itemsize[tensor] == places.nbytes
        sound &= np.where(places.codec == 0, plain, places.nbytes >= 0)
        here = object_ != NOT_HERE
        if len(objects):
            fits = (places.start >= 0) & (places.start <= objects[object_] - places.nbytes) & places.digested
            sound &= fits | ~here
        return None if sound.all() else int(np.argmin(sound))

    def first_element(self, chunks: Chunks) -> _Numbers:
        """Return the number of each row's first element within its tensor, in row-major order."""
        boxes = chunks.boxes
        within = np.zeros(len(boxes), np.int64)
        for axis in range(min(boxes.offset.shape[1], self.stride.shape[1])):
            within += boxes.offset[:, axis] * self.stride[boxes.tensor, axis]
        return within


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
