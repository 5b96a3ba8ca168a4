"""How a manifest is stored: pages of chunks, then an index with the digest of each, so that parts of it can be read.

Chunks are laid out so that what one rank wants lies together: tensors that are cut alike form a group, and in a group
the first 64 parts of each of its tensors come first, then the next 64. A rank that wants the k-th part of every tensor
finds them in neighboring pages, which are one request; where every tensor is cut differently, it is one for each.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from resilient.errors import CorruptError, ErrorKind
from resilient.format import first_encoding
from resilient.format.chunks import Boxes, Chunks, Column
from resilient.format.columns import (
    UNDECODABLE,
    Table,
    compress,
    decompress,
    distinct,
    malformed,
    pack_boxes,
    pack_columns,
    pack_table,
    unpack_boxes,
    unpack_columns,
    unpack_tables,
)
from resilient.format.digest import NBYTES, digest
from resilient.format.documents import Item, Manifest, Object, ReceiptRef, Tensor, Value
from resilient.format.frame import seal, unseal
from resilient.format.layout import Attempt

INDEX_KIND: Final = b"MNFX"
_PAGE_ROWS: Final = 2048
_NEIGHBORS: Final = 64
_PAGES_AT_ONCE: Final = 64
_EXTREMES: Final = (np.minimum, np.maximum)
_SCALE: Final = 1 << 20
"""Into how many parts each dimension of a tensor is divided to say where a page lies."""


class Pages(msgspec.Struct, array_like=True, frozen=True):
    """The pages of a manifest: ``columns`` is a block of what is known of each, ``regions`` where its chunks lie.

    The columns are: bytes, chunks, and the numbers of the first and the last tensor. The regions are boxes: the group
    in place of a tensor, and for each dimension the part that the chunks cover, in parts of 2^20 of their tensors.
    """

    count: int
    columns: bytes
    regions: bytes
    digests: bytes


class StoredIndex(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What a manifest says beside its chunks, as it is stored."""

    step: int
    generation: int
    nonce: str
    world_size: int
    items: tuple[Item, ...]
    tensors: tuple[Tensor, ...]
    objects: tuple[Object, ...]
    values: tuple[Value, ...]
    receipts: bytes
    groups: bytes
    pages: Pages


_encoder: Final = msgspec.msgpack.Encoder()
_indices: Final = msgspec.msgpack.Decoder(StoredIndex)
_tables: Final = msgspec.msgpack.Decoder(Table)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Index:
    """What a manifest says beside its chunks, and where those are.

    ``start``, ``nbytes``, ``rows``, ``digests``: of each page. ``first``, ``last``: its tensors. ``regions``: the part
    of each group's tensors that it covers. ``groups``: of each tensor.
    """

    attempt: Attempt
    world_size: int
    items: tuple[Item, ...]
    tensors: tuple[Tensor, ...]
    objects: tuple[Object, ...]
    values: tuple[Value, ...]
    receipts: tuple[ReceiptRef, ...]
    groups: Column
    start: Column
    nbytes: Column
    rows: Column
    digests: Column
    first: Column
    last: Column
    regions: Boxes

    def holding(self, wanted: Boxes) -> list[int]:
        """Return the pages that may hold chunks that share an element with these boxes."""
        tensors = wanted.tensor.astype(np.int64)
        scale = _scale([each.shape for each in self.tensors], wanted.offset.shape[1])
        fractions = _fractions(wanted, scale)
        wanted = _region(self.groups[tensors], *fractions)
        # Tensors of one group mostly want the same part: each part is looked up once.
        keys = np.column_stack([wanted.tensor, wanted.offset, wanted.size])
        which, part = distinct(keys)
        pages, parts = self.regions.meeting(wanted.take(which))
        # Of those pages, the ones between whose first and last tensor lies one that wants that part.
        beyond = len(self.tensors)
        sought = np.sort(part * beyond + tensors)
        at = np.searchsorted(sought, parts * beyond + self.first[pages])
        near = at < len(sought)
        near[near] = sought[at[near]] <= (parts * beyond + self.last[pages])[near]
        return np.unique(pages[near]).tolist()  # type: ignore[no-any-return]


def tally(boxes: Boxes, first: int, tensors: int) -> Column:
    """Return, for each of so many tensors from ``first`` on, into how many parts it is cut, and into how many rows.

    That tells the layout of one mesh from another's well enough.
    """
    number = boxes.tensor - first
    heads = np.ones(len(boxes), bool)
    for axis in range(1, boxes.offset.shape[1]):
        heads &= boxes.offset[:, axis] == 0
    counts = [np.bincount(which, minlength=tensors) for which in (number, number[heads])]
    return np.stack(counts, axis=1)


def arranged(tallied: Column) -> Column:
    """Return the order in which a manifest lists chunks, which come by tensor and offset."""
    groups, counts = _groups(tallied), tallied[:, 0]
    starts = np.cumsum(counts) - counts
    order = np.empty(int(counts.sum()), np.int32)
    members = np.argsort(groups, kind="stable")
    end = 0
    for of_group in np.split(members, np.flatnonzero(np.diff(groups[members])) + 1):
        many = int(counts[of_group[:1]].sum())  # each of these tensors has as many
        neighbors = max(_NEIGHBORS, _PAGE_ROWS // len(of_group) if len(of_group) else 1)
        for first in range(0, many, neighbors):
            block = np.add.outer(starts[of_group], np.arange(first, min(first + neighbors, many))).ravel()
            order[end : end + len(block)] = block
            end += len(block)
    return order


def encode_manifest(manifest: Manifest) -> tuple[bytes, int]:
    """Return the bytes of a manifest, and how many of them, at its end, are its index: the digest of those names it."""
    boxes = manifest.chunks.boxes
    groups = _groups(tally(boxes, 0, len(manifest.tensors)))
    starts = _page_starts(groups[boxes.tensor], boxes.tensor)
    out = io.BytesIO()  # its value is not copied, and it may be a gigabyte
    nbytes: list[int] = []
    digests: list[bytes] = []
    for start, end in itertools.pairwise([*starts, len(boxes)]):
        page = _encoder.encode(pack_table(manifest.chunks.take(slice(start, end))))
        out.write(page)
        nbytes.append(len(page))
        digests.append(digest(page))
    shapes = [tensor.shape for tensor in manifest.tensors]
    pages = Pages(
        count=len(starts),
        columns=pack_columns(
            [
                np.array(nbytes, np.int64),
                np.diff([*starts, len(boxes)]),
                *(extreme.reduceat(boxes.tensor, starts) if starts else boxes.tensor for extreme in _EXTREMES),
            ]
        ),
        regions=pack_boxes(_page_regions(boxes, groups, shapes, starts)),
        digests=b"".join(digests),
    )
    index = _seal_index(manifest, groups, pages)
    out.write(index)
    return out.getvalue(), len(index)


def _seal_index(manifest: Manifest, groups: Column, pages: Pages) -> bytes:
    index = StoredIndex(
        step=manifest.step,
        generation=manifest.generation,
        nonce=manifest.nonce,
        world_size=manifest.world_size,
        items=manifest.items,
        tensors=manifest.tensors,
        objects=manifest.objects,
        values=manifest.values,
        receipts=b"".join(each.digest for each in manifest.receipts),
        groups=pack_columns([groups]),
        pages=pages,
    )
    return seal(INDEX_KIND, compress(_encoder.encode(index)))


def decode_index(data: bytes, where: str) -> Index:
    """Return the index of a manifest.

    Raises:
        CorruptError: it is torn, changed, foreign, or of a newer format; ``where`` is named.
    """
    try:
        found = _indices.decode(decompress(unseal(INDEX_KIND, data, where)))
        return _open_index(found)
    except UNDECODABLE as error:
        raise malformed(where, error) from error


def _open_index(found: StoredIndex) -> Index:
    (groups,) = unpack_columns(found.groups, len(found.tensors))
    nbytes, rows, first, last = (
        column.astype(np.int64) for column in unpack_columns(found.pages.columns, found.pages.count)
    )
    receipts = [found.receipts[at : at + NBYTES] for at in range(0, len(found.receipts), NBYTES)]
    return Index(
        attempt=Attempt(step=found.step, generation=found.generation, nonce=found.nonce),
        world_size=found.world_size,
        items=found.items,
        tensors=found.tensors,
        objects=found.objects,
        values=found.values,
        receipts=tuple(ReceiptRef(rank, each) for rank, each in enumerate(receipts)),
        groups=groups,
        start=np.cumsum(nbytes) - nbytes,
        nbytes=nbytes,
        rows=rows,
        digests=np.frombuffer(found.pages.digests, np.uint8).reshape(found.pages.count, NBYTES),
        first=first,
        last=last,
        regions=unpack_boxes([found.pages.regions], [found.pages.count]),
    )


def decode_pages(index: Index, pages: Iterable[tuple[int, memoryview]], where: str) -> Iterator[Chunks]:
    """Yield the chunks of some pages, given the number and the bytes of each: those of many at a time.

    Raises:
        CorruptError: they are not what was written; ``where`` is named.
    """
    ahead = iter(pages)
    while some := list(itertools.islice(ahead, _PAGES_AT_ONCE)):
        yield _decode_pages(index, some, where)


def _decode_pages(index: Index, pages: Sequence[tuple[int, memoryview]], where: str) -> Chunks:
    if any(digest(data) != index.digests[page].tobytes() for page, data in pages):
        raise CorruptError(f"{where} is not what was written: its digest differs", kind=ErrorKind.BAD_DIGEST)
    try:
        tables = [_tables.decode(data) for _, data in pages]
        if [table.rows for table in tables] != index.rows[[page for page, _ in pages]].tolist():
            raise CorruptError(f"{where} does not have the chunks that its index lists", kind=ErrorKind.MALFORMED)
        return unpack_tables(tables)
    except UNDECODABLE as error:
        raise malformed(where, error) from error


def decode_manifest(data: bytes, index_nbytes: int | None, where: str) -> Manifest:
    """Return a manifest of which all bytes are at hand; ``index_nbytes`` is None for one of the first encoding.

    The digest that names it is the caller's to compare.

    Raises:
        CorruptError: it is torn, changed, foreign, or of a newer format; ``where`` is named.
    """
    if index_nbytes is None:
        try:
            return first_encoding.manifest_of(unseal(first_encoding.MANIFEST_KIND, data, where))
        except UNDECODABLE as error:
            raise malformed(where, error) from error
    view = memoryview(data)
    index = decode_index(bytes(view[len(data) - index_nbytes :]), where)
    if int(index.nbytes.sum()) != len(data) - index_nbytes:
        raise CorruptError(f"{where} does not have the pages that its index lists", kind=ErrorKind.MALFORMED)
    pages = enumerate(
        view[start : start + nbytes] for start, nbytes in zip(index.start.tolist(), index.nbytes.tolist(), strict=True)
    )
    return Manifest(
        step=index.attempt.step,
        generation=index.attempt.generation,
        nonce=index.attempt.nonce,
        world_size=index.world_size,
        items=index.items,
        tensors=index.tensors,
        objects=index.objects,
        chunks=Chunks.joined(list(decode_pages(index, pages, where))),
        values=index.values,
        receipts=index.receipts,
    )


def _groups(tallied: Column) -> Column:
    """Return the group of each tensor: those of one group are cut alike."""
    return distinct(tallied)[1]


def _page_starts(groups: Column, tensors: Column) -> list[int]:
    """Return where pages start, given the group and the tensor of each chunk.

    No page holds chunks of two groups, nor the last tensor's parts and then the first one's next: it would seem to hold
    a bit of everything.
    """
    borders = np.flatnonzero((groups[1:] != groups[:-1]) | (tensors[1:] < tensors[:-1])) + 1
    begins = [*([0] if len(groups) else []), *borders.tolist()]
    return [
        start for begin, end in itertools.pairwise([*begins, len(groups)]) for start in range(begin, end, _PAGE_ROWS)
    ]


def _scale(shapes: Sequence[tuple[int, ...]], width: int) -> Column:
    """Return how many parts of 2^20 of its tensor an element is, in each of so many dimensions of each tensor."""
    extents = np.array([(*shape[:width], *[1] * (width - len(shape))) for shape in shapes])
    scale: Column = _SCALE / np.maximum(extents.reshape(len(shapes), width), 1)
    return scale


def _fractions(boxes: Boxes, scale: Column, starts: Column | None = None) -> tuple[Column, Column]:
    """Return where boxes begin and end, in parts of 2^20 of their tensors; ``scale`` is theirs.

    ``starts``: not each box by itself, but all from each of these rows to the next together.
    """
    width = boxes.offset.shape[1]
    lows, ends = [], []
    for axis in range(width):
        by = scale[:, axis][boxes.tensor]
        low = boxes.offset[:, axis] * by
        end = np.add(boxes.offset[:, axis], boxes.size[:, axis], dtype=np.int64) * by
        lows.append(low if starts is None else np.minimum.reduceat(low, starts))
        ends.append(end if starts is None else np.maximum.reduceat(end, starts))
    rows = len(boxes) if starts is None else len(starts)
    return np.array(lows).T.reshape(rows, width), np.array(ends).T.reshape(rows, width)


def _region(group: Column, low: Column, end: Column) -> Boxes:
    """Return boxes given in fractions, rounded outwards, with a group in place of the tensor."""
    # Rounding keeps the order of fractions: of two boxes that meet, the regions meet.
    offset = np.floor(low).astype(np.int64)
    ndim = np.full(len(group), low.shape[1], np.uint8)  # tensors of fewer dimensions may be among them
    return Boxes(
        tensor=group.astype(np.int32), ndim=ndim, offset=offset, size=np.floor(end).astype(np.int64) + 1 - offset
    )


def _page_regions(boxes: Boxes, groups: Column, shapes: Sequence[tuple[int, ...]], starts: Sequence[int]) -> Boxes:
    """Return the region of each page: the smallest that covers those of its chunks."""
    covering = []
    scale = _scale(shapes, boxes.offset.shape[1])
    for some in range(0, len(starts), _PAGES_AT_ONCE):
        begins = np.array(starts[some : some + _PAGES_AT_ONCE])
        end = [*starts, len(boxes)][some + len(begins)]
        fractions = _fractions(boxes.take(slice(int(begins[0]), end)), scale, begins - begins[0])
        covering.append(_region(groups[boxes.tensor[begins]], *fractions))
    return Boxes.joined(covering) if covering else boxes
