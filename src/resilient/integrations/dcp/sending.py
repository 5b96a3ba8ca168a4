"""Storing the parts of tensors that one rank was given to store."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import torch

from resilient.format.box import Box, split
from resilient.format.chunks import Chunk
from resilient.format.digest import digest
from resilient.format.documents import Object
from resilient.format.layout import Attempt
from resilient.state.gathering import resolved
from resilient.state.tensors import flat
from resilient.store.base import Store

_THREADS: Final = 4
_OBJECT_NBYTES: Final = 64 << 20
"""How large an object becomes; so much, a few times, is in memory if the tensors are not."""


class Sender:
    """Stores one part after another, back to back in objects, several of which are on their way at once."""

    def __init__(self, store: Store, attempt: Attempt, rank: int, *, chunk_nbytes: int) -> None:
        self._store = store
        self._attempt = attempt
        self._rank = rank
        self._chunk_nbytes = chunk_nbytes
        self._pieces: list[memoryview] = []
        self._nbytes = 0
        self.objects: list[Object] = []
        self.chunks: list[Chunk] = []

    def send(self, parts: Iterable[tuple[int, Box, torch.Tensor]]) -> None:
        """Store parts: the number of the tensor, the box, and its elements on any device; durable when it returns."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="resilient-dcp") as pool:
            under_way: deque[Future[None]] = deque()
            for key, pieces in self._loads(parts):
                while len(under_way) >= _THREADS:
                    under_way.popleft().result()
                under_way.append(pool.submit(self._store.put, key, pieces))
                del pieces
            for each in under_way:
                each.result()

    def withdraw(self) -> None:
        """Remove what was stored."""
        for each in self.objects:
            self._store.delete(each.key)

    def _loads(self, parts: Iterable[tuple[int, Box, torch.Tensor]]) -> Iterator[tuple[str, list[memoryview]]]:
        for number, box, tensor in parts:
            itemsize = tensor.dtype.itemsize
            data = _bytes(tensor)
            start = 0
            for piece in split(box, itemsize, self._chunk_nbytes):
                nbytes = piece.volume * itemsize
                if self._pieces and self._nbytes + nbytes > _OBJECT_NBYTES:
                    yield self._closed()
                self._add(number, piece, data[start : start + nbytes])
                start += nbytes
        if self._pieces:
            yield self._closed()

    def _add(self, number: int, piece: Box, data: memoryview) -> None:
        self.chunks.append(
            Chunk(
                tensor=number,
                offset=piece.offset,
                size=piece.size,
                object=len(self.objects),
                start=self._nbytes,
                nbytes=len(data),
                digest=digest(data),
            )
        )
        self._pieces.append(data)
        self._nbytes += len(data)

    def _closed(self) -> tuple[str, list[memoryview]]:
        """Return the object that is full, and begin the next one."""
        one = Object(key=self._attempt.data(self._rank, len(self.objects)), nbytes=self._nbytes)
        pieces = self._pieces
        self.objects.append(one)
        self._pieces, self._nbytes = [], 0
        return one.key, pieces


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor, row-major; in its own memory if they lie so on the CPU."""
    return flat(resolved(tensor.detach()).cpu()).view(torch.uint8).numpy().data
