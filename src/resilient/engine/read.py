"""Filling tensors from a checkpoint: only the ranges that are needed, each verified before a byte of it is used."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import torch

from resilient.catalog.fetch import check_chunk, read_span
from resilient.errors import CorruptError, ErrorKind
from resilient.format.box import Box, intersect
from resilient.format.documents import Chunk, Manifest, Tensor
from resilient.state.prepare import Target
from resilient.state.tensors import dtype_of
from resilient.store.base import Store

_SPAN_NBYTES: Final = 16 << 20
_GAP_NBYTES: Final = 4 << 10
_THREADS: Final = 4

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """A box that goes from a chunk into a target."""

    target: Target
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Neighboring chunks of one object, read with one request."""

    chunks: tuple[Chunk, ...]

    @property
    def start(self) -> int:
        return self.chunks[0].start

    @property
    def nbytes(self) -> int:
        return self.chunks[-1].start + self.chunks[-1].nbytes - self.start


def fill(store: Store, manifest: Manifest, targets: Sequence[Target], progress: Progress | None = None) -> int:
    """Read what the targets need into them; return the bytes read.

    Reads at most the chunks that a target overlaps, plus gaps of 4 KiB between them. Needs `_THREADS` buffers of 16 MiB
    (or of the largest chunk) beside the targets. A tensor is written chunk by chunk, each after its digest was
    compared.

    Raises:
        CorruptError: a chunk is missing, short or changed; it names object, tensor and rank. Targets are then partly
        filled.
    """
    copies = _plan(manifest, targets)
    wanted = [manifest.chunks[index] for index in copies]
    order = {id(chunk): index for index, chunk in zip(copies, wanted, strict=True)}
    spans = list(_spans(wanted))
    total = sum(span.nbytes for span in spans)
    buffers = threading.local()
    done = 0
    lock = threading.Lock()

    def read(span: _Span) -> None:
        nonlocal done
        buffer = _buffer(buffers, span.nbytes)
        read_span(store, manifest, span.chunks, buffer)
        for chunk in span.chunks:
            at = chunk.start - span.start
            data = buffer[at : at + chunk.nbytes]
            check_chunk(manifest, chunk, data)
            _copy(manifest, chunk, data, copies[order[id(chunk)]])
        with lock:
            done += span.nbytes
            if progress is not None:
                progress(done, total)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="resilient-read") as pool:
        futures = [pool.submit(read, span) for span in spans]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return total


def _plan(manifest: Manifest, targets: Sequence[Target]) -> dict[int, list[_Copy]]:
    """Return what to copy out of each chunk, by the chunk's index; prove first that the chunks cover every target."""
    numbers = {_identity(tensor): number for number, tensor in enumerate(manifest.tensors)}
    chunks: defaultdict[int, list[int]] = defaultdict(list)
    for index, chunk in enumerate(manifest.chunks):
        chunks[chunk.tensor].append(index)
    copies: defaultdict[int, list[_Copy]] = defaultdict(list)
    for target in targets:
        found = 0
        for index in chunks[numbers[_identity(target.tensor)]]:
            box = intersect(manifest.chunks[index].box, target.box)
            if box is not None:
                copies[index].append(_Copy(target=target, box=box))
                found += box.volume
        if found != target.box.volume:
            what = f"{target.tensor.item}: {target.tensor.name}"
            raise CorruptError(
                f"{what}: the manifest lists {found} of the {target.box.volume} elements", kind=ErrorKind.INCOMPLETE
            )
    return copies


def _identity(tensor: Tensor) -> tuple[str, str, int | None]:
    return tensor.item, tensor.name, tensor.rank


def _spans(chunks: Sequence[Chunk]) -> Iterator[_Span]:
    run: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda one: (one.object, one.start)):
        if run and not _joins(run, chunk):
            yield _Span(chunks=tuple(run))
            run = []
        run.append(chunk)
    if run:
        yield _Span(chunks=tuple(run))


def _joins(run: list[Chunk], chunk: Chunk) -> bool:
    last = run[-1]
    near = chunk.object == last.object and chunk.start - (last.start + last.nbytes) <= _GAP_NBYTES
    return near and chunk.start + chunk.nbytes - run[0].start <= _SPAN_NBYTES


def _buffer(buffers: threading.local, nbytes: int) -> memoryview:
    """Return memory of the calling thread's own, kept between calls: first touches are what costs."""
    held: bytearray = getattr(buffers, "held", bytearray())
    if len(held) < nbytes:
        held = buffers.held = bytearray(max(nbytes, _SPAN_NBYTES if nbytes > _SPAN_NBYTES // 8 else nbytes))
    return memoryview(held)[:nbytes]


@torch.no_grad()
def _copy(manifest: Manifest, chunk: Chunk, data: memoryview, copies: Sequence[_Copy]) -> None:
    dtype = dtype_of(manifest.tensors[chunk.tensor].dtype)
    # clone only where the chunk does not start at a multiple of its element size inside the span
    stored = torch.frombuffer(data, dtype=torch.uint8)
    if stored.data_ptr() % dtype.itemsize:
        stored = stored.clone()
    source = stored.view(dtype).view(chunk.size)
    for each in copies:
        into = each.target.into[each.box.relative_to(each.target.box)]
        into.copy_(source[each.box.relative_to(chunk.box)])
