"""Copying the state of a step boundary into memory of our own, on the training thread.

The first engine copies everything before the boundary returns: what is saved is the state at the boundary, whatever the
training does afterwards. One arena is kept for ever, because the first touch of new memory is the slowest step of a
copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch

from resilient.engine.division import Piece
from resilient.state.leaves import Captured

_ALIGN: Final = 16  # the largest element (complex128): a view of another dtype must start at a multiple of its size


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPiece:
    """A piece and where its row-major bytes lie."""

    piece: Piece
    data: memoryview


class Arena:
    """One buffer in host memory, as large as the largest state so far."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    @torch.no_grad()
    def stage(self, captured: Captured, pieces: Iterable[Piece]) -> list[StagedPiece]:
        """Copy pieces of a captured state; what is returned stays valid until the next call."""
        placed = []
        end = 0
        for piece in pieces:
            placed.append((piece, end))
            end += -(-piece.nbytes // _ALIGN) * _ALIGN
        if end > self.nbytes:
            self._buffer = torch.empty(end, dtype=torch.uint8)
        bytes_of_arena = self._buffer.numpy().data
        staged = []
        for piece, start in placed:
            leaf = captured.tensors[piece.leaf]
            flat = self._buffer[start : start + piece.nbytes]
            source = leaf.local[piece.box.relative_to(leaf.box)]
            flat.view(source.dtype).view(piece.box.size).copy_(source)
            staged.append(StagedPiece(piece=piece, data=bytes_of_arena[start : start + piece.nbytes]))
        return staged
