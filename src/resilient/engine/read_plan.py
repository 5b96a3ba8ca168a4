"""Which stored ranges a restore reads, in which order, and where each byte of them goes.

Worked out in columns: a state of 100,000 tensors has as many rows, and a microsecond for each is a tenth of a second.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch

from resilient.catalog.contents import Contents
from resilient.engine.spans import ELSEWHERE, Line, Numbers, Span
from resilient.errors import CorruptError, ErrorKind
from resilient.format import codec
from resilient.format.chunks import Boxes, Chunks, widened
from resilient.format.digest import NBYTES
from resilient.format.dtypes import ITEMSIZE
from resilient.state.collector import nothing_collected
from resilient.state.prepare import Target
from resilient.store.base import Capabilities

_identity = attrgetter("item", "name", "rank")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """The parts of chunks that go into targets: lists, one element for each part, in the order of the rows.

    Part p goes into the target ``target[p]``: ``nbytes[p]`` bytes from ``source[p]`` on in the decoded chunk, to
    ``address[p]`` as they are. The address is `ELSEWHERE` where they do not lie side by side in both, or where the
    target is not in this process's memory. Those of row r are the parts from ``first[r]`` to ``first[r + 1]``.
    """

    first: list[int]
    target: list[int]
    source: list[int]
    nbytes: list[int]
    address: list[int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadPlan:
    """``spans`` in the order of first use, of ``rows``: the chunks that are read, by object and place in it.

    What is looked up for each row is in lists besides: there it takes a tenth of the time.
    """

    spans: tuple[Span, ...]
    rows: Chunks
    start: list[int]
    nbytes: list[int]
    digest: list[bytes]
    codec: list[int]
    pieces: Pieces

    @property
    def total_nbytes(self) -> int:
        """Bytes that are read."""
        return sum(span.nbytes for span in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parts:
    """What pairs of a chunk and a target share: elements, where they begin in both, and whether they are one range."""

    volume: Numbers
    source: Numbers
    into: Numbers
    one_range: npt.NDArray[np.bool_]


@nothing_collected()
def plan_reads(manifest: Contents, targets: Sequence[Target], capabilities: Capabilities) -> ReadPlan:
    """Return what to read for some targets from a store; prove first that the chunks cover every one of them.

    Raises:
        CorruptError: the manifest has no bytes for a part of a target.
    """
    numbers = dict(zip(map(_identity, manifest.tensors), itertools.count(), strict=False))
    wanted = Boxes.of([numbers[_identity(each.tensor)] for each in targets], [each.box for each in targets])
    found = manifest.overlapping(wanted)
    chunk, target = found.boxes.meeting(wanted)
    parts = _shared(found.boxes.take(chunk), wanted.take(target))
    _check_covered(targets, wanted, target, parts.volume)

    line = Line(found)
    row = np.argsort(line.order)[chunk]
    by_row = np.argsort(row, kind="stable")
    target, row = target[by_row], row[by_row]
    itemsize = np.array([ITEMSIZE[each.tensor.dtype] for each in targets], np.int64)[target]
    memory = np.array(_addresses([each.into for each in targets]), np.int64)[target]
    in_memory = parts.one_range[by_row] & (memory != ELSEWHERE)
    address = np.where(in_memory, memory + parts.into[by_row] * itemsize, ELSEWHERE)
    nbytes = parts.volume[by_row] * itemsize
    first = np.searchsorted(row, np.arange(len(found) + 1))
    places = line.rows.places
    as_stored = (np.diff(first) == 1) & (nbytes[first[:-1]] == places.nbytes) & (places.codec == codec.RAW)
    # What a store reads best in units lies in them only in a buffer.
    straight = as_stored & (capabilities.unit_nbytes == 1)
    spans = line.spans(np.where(straight, address[first[:-1]], ELSEWHERE), capabilities.request_nbytes)
    digests = np.ascontiguousarray(places.digest).tobytes()
    return ReadPlan(
        spans=tuple(
            spans[number].in_units(
                capabilities.unit_nbytes, manifest.objects[int(places.object[spans[number].first])].nbytes
            )
            for number in _by_first_use(spans, first, target)
        ),
        rows=line.rows,
        start=places.start.tolist(),
        nbytes=places.nbytes.tolist(),
        digest=[digests[at : at + NBYTES] for at in range(0, len(digests), NBYTES)],
        codec=places.codec.tolist(),
        pieces=Pieces(
            first=first.tolist(),
            target=target.tolist(),
            source=(parts.source[by_row] * itemsize).tolist(),
            nbytes=nbytes.tolist(),
            address=address.tolist(),
        ),
    )


def _shared(chunks: Boxes, targets: Boxes) -> _Parts:
    """Return what each chunk shares with the target beside it; both are stored row-major."""
    width = max(chunks.offset.shape[1], targets.offset.shape[1])
    chunk_offset, target_offset = (widened(each.offset, width, 0).astype(np.int64) for each in (chunks, targets))
    chunk_size, target_size = (widened(each.size, width, 1).astype(np.int64) for each in (chunks, targets))
    offset = np.maximum(chunk_offset, target_offset)
    size = np.minimum(chunk_offset + chunk_size, target_offset + target_size) - offset
    # One range in both: from some dimension on all that chunk and target have, and single elements before that one.
    whole = (size == chunk_size) & (size == target_size)
    single = size == 1
    one_range = whole.all(axis=1)
    for axis in range(width):
        one_range |= single[:, :axis].all(axis=1) & whole[:, axis + 1 :].all(axis=1)
    return _Parts(
        volume=np.prod(size, axis=1),
        source=((offset - chunk_offset) * _strides(chunk_size)).sum(axis=1),
        into=((offset - target_offset) * _strides(target_size)).sum(axis=1),
        one_range=one_range,
    )


def _strides(size: Numbers) -> Numbers:
    """Return how many elements lie between two neighbors along each dimension, row by row."""
    behind = np.cumprod(size[:, ::-1], axis=1)[:, ::-1]
    return np.hstack([behind[:, 1:], np.ones((len(size), 1), np.int64)])[:, : size.shape[1]]


def _check_covered(targets: Sequence[Target], wanted: Boxes, target: Numbers, volume: Numbers) -> None:
    found = np.zeros(len(targets), np.int64)
    np.add.at(found, target, volume)
    for number in np.flatnonzero(found != wanted.volume).tolist():
        tensor, box = targets[number].tensor, targets[number].box
        raise CorruptError(
            f"{tensor.item}: {tensor.name}: the manifest lists {found[number]} of the {box.volume} elements",
            kind=ErrorKind.INCOMPLETE,
        )


def _by_first_use(spans: Sequence[Span], first: Numbers, target: Numbers) -> list[int]:
    """Return the numbers of the spans in the order of the first target of each."""
    begins = first[[span.first for span in spans]]
    order: list[int] = np.argsort(np.minimum.reduceat(target, begins), kind="stable").tolist() if spans else []
    return order


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return where each tensor begins, if it is in this process's memory and row-major."""
    return [each.data_ptr() if each.is_cpu and each.is_contiguous() else ELSEWHERE for each in tensors]
