"""Filling tensors from a checkpoint: only the ranges that are needed, each compared with its digest."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from typing import Final

import torch
from torch.autograd.graph import increment_version

from resilient.catalog.contents import Contents
from resilient.catalog.fetch import decoded_nbytes, read_span, unpack
from resilient.catalog.once import again_if_corrupt
from resilient.engine.bounce import Bounce
from resilient.engine.read_plan import ReadPlan, plan_reads
from resilient.engine.spans import ELSEWHERE, Span
from resilient.errors import CorruptError
from resilient.format import codec
from resilient.format.box import intersect
from resilient.format.chunks import Chunk
from resilient.format.digest import digest
from resilient.state.prepare import Target
from resilient.state.tensors import dtype_of
from resilient.store.base import Store
from resilient.store.nearest import NearestStore

THREADS: Final = 4
_BRIEF_NBYTES: Final = 32 << 10

# Keeps the GIL: to give it away and get it back takes longer than a brief copy.
_copy_briefly = ctypes.PyDLL(None).memmove
_copy_briefly.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy_briefly.restype = None

Progress = Callable[[int, int], None]


def fill(store: Store, manifest: Contents, targets: Sequence[Target], progress: Progress | None = None) -> int:
    """Read what the targets need into them; return the bytes read.

    Reads at most the chunks that a target overlaps, plus gaps of 4 KiB between them. Bytes that lie in a target as they
    are stored are read to their place, unless the store reads better in units; all others go through `THREADS` buffers
    of the store's request (4 or 16 MiB) or of the largest chunk.

    Raises:
        CorruptError: a chunk is missing, short or changed; it names object, tensor and rank. The targets are spoiled:
            parts of them were already replaced, also by bytes that turned out to be wrong.
    """
    plan = plan_reads(manifest, targets, store.capabilities)
    with closing(Filling(store, manifest, targets, plan)) as filling:
        filling.read_all(plan.spans, progress)
    return plan.total_nbytes


def _in_parallel(read: Callable[[Span], None], spans: Sequence[Span]) -> None:
    """Read all spans, begun in their order; after a failure no further one is begun."""
    waiting = deque(spans)

    def work() -> None:
        while True:
            try:
                span = waiting.popleft()
            except IndexError:
                return
            read(span)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="resilient-read") as pool:
        futures = [pool.submit(work) for _ in range(min(THREADS, len(spans)))]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            waiting.clear()
        for future in futures:
            future.result()


class Filling:
    """Takes the spans of a plan, in any order and from several threads: verifies the bytes and puts them in place."""

    def __init__(self, store: Store, manifest: Contents, targets: Sequence[Target], plan: ReadPlan) -> None:
        self._store = store
        self._manifest = manifest
        self._targets = targets
        self._plan = plan
        accelerators = {target.into.device for target in targets if not target.into.is_cpu}
        self._bounces = [Bounce(accelerators) for _ in range(THREADS)]
        self._free: queue.SimpleQueue[Bounce] = queue.SimpleQueue()
        for each in self._bounces:
            self._free.put(each)
        # What changes behind torch's back must not pass for unchanged: a backward pass would use values that are gone.
        increment_version([target.into for target in targets])

    def read_all(self, spans: Sequence[Span], progress: Progress | None = None) -> None:
        """Read spans from the store and accept them."""
        total = sum(span.nbytes for span in spans)
        done = 0
        lock = threading.Lock()

        def read(span: Span) -> None:
            nonlocal done
            with self.bounce() as bounce:
                again_if_corrupt(lambda: self._fill(span, bounce))
            with lock:
                done += span.nbytes
                if progress is not None:
                    progress(done, total)

        _in_parallel(read, spans)

    def _fill(self, span: Span, bounce: Bounce) -> None:
        stored = self.memory(span, bounce)
        self.read(span, stored)
        try:
            self.accept(span, stored, bounce)
        except CorruptError:
            if isinstance(self._store, NearestStore):  # the next try is to ask the store itself
                self._store.distrust(self._manifest.objects[self._plan.rows[span.first].object].key)
            raise

    def read(self, span: Span, into: memoryview) -> None:
        """Read the stored bytes of a span; nothing is verified yet."""
        read_span(self._store, self._manifest, self._plan.rows[span.first], span.start, into)

    @contextmanager
    def bounce(self) -> Iterator[Bounce]:
        """Lend the memory that one span at a time goes through."""
        bounce = self._free.get()
        try:
            bounce.settle()
            yield bounce
        finally:
            self._free.put(bounce)

    def close(self) -> None:
        """Wait until everything has arrived; no span may be in work any more."""
        for bounce in self._bounces:
            bounce.settle()

    def memory(self, span: Span, bounce: Bounce) -> memoryview:
        """Return where the stored bytes of a span are to be put, for `accept`."""
        if span.address != ELSEWHERE:
            return memoryview((ctypes.c_char * span.nbytes).from_address(span.address)).cast("B")
        return _view(bounce.take("stored", span.nbytes, at=span.start))

    def accept(self, span: Span, stored: memoryview, bounce: Bounce) -> None:
        """Compare each chunk of a span with its digest, and put it into its targets.

        Raises:
            CorruptError: a chunk is not what was written.
        """
        plan = self._plan
        base = _address(stored)
        for row in range(span.first, span.end):
            at = plan.start[row] - span.start
            data = stored[at : at + plan.nbytes[row]]
            if plan.codec[row] != codec.RAW or digest(data) != plan.digest[row]:
                data = self._unpack(plan.rows[row], data, bounce)
                self._place(row, data, _address(data), bounce)
            elif span.address == ELSEWHERE:
                self._place(row, data, base + at, bounce)

    def _unpack(self, chunk: Chunk, stored: memoryview, bounce: Bounce) -> memoryview:
        return unpack(
            self._manifest,
            chunk,
            stored,
            _view(bounce.take("decoded", decoded_nbytes(self._manifest.tensors[chunk.tensor], chunk))),
        )

    def _place(self, row: int, data: memoryview, address: int, bounce: Bounce) -> None:
        """Copy what the targets want of a chunk."""
        pieces = self._plan.pieces
        for piece in range(pieces.first[row], pieces.first[row + 1]):
            into, nbytes = pieces.address[piece], pieces.nbytes[piece]
            if into == ELSEWHERE:
                self._place_elements(self._plan.rows[row], self._targets[pieces.target[piece]], data, bounce)
            elif nbytes <= _BRIEF_NBYTES:
                _copy_briefly(into, address + pieces.source[piece], nbytes)
            else:
                ctypes.memmove(into, address + pieces.source[piece], nbytes)

    @torch.no_grad()
    def _place_elements(self, chunk: Chunk, target: Target, data: memoryview, bounce: Bounce) -> None:
        dtype = dtype_of(target.tensor.dtype)
        elements = torch.frombuffer(data, dtype=torch.uint8)
        if (
            elements.data_ptr() % dtype.itemsize
        ):  # an object where it does not start at a multiple of its element's size
            elements = elements.clone()
        box = intersect(chunk.box, target.box)
        assert box is not None, "the plan pairs what overlaps"
        source = elements.view(dtype).view(chunk.size)[box.relative_to(chunk.box)]
        bounce.copy(target.into[box.relative_to(target.box)], source)


def _view(memory: torch.Tensor) -> memoryview:
    return memory.numpy().data


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
