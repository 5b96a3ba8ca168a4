"""What a structure says, unpacked once for all saves of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from resilient.format.chunks import NOT_HERE, Boxes, Column, Places
from resilient.format.digest import NBYTES, digest
from resilient.format.dtypes import ITEMSIZE
from resilient.writer.messages import Structure

Digests = npt.NDArray[np.uint8]
"""One row of `NBYTES` for each piece; what was not staged has zeros."""

_NOT_STAGED = bytes(NBYTES)


class Outline:
    """The pieces of a structure: ``boxes`` as a receipt has them, and where each lies in objects and in the slot."""

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.tensor = _column(structure.tensor)
        self.object = _column(structure.object)
        self.start = _column(structure.start)
        self.nbytes = _column(structure.nbytes)
        self.at = _column(structure.at)
        self.boxes = self._boxes()
        self.itemsize = np.array([ITEMSIZE[each.dtype] for each in structure.tensors], np.int64)[self.tensor]
        self.mine: npt.NDArray[np.int64] = np.flatnonzero(self.object != NOT_HERE)
        """Which pieces this rank stores."""
        self._spans = list(zip(self.at.tolist(), (self.at + self.nbytes).tolist(), strict=True))

    @property
    def number(self) -> int:
        return self.structure.number

    @property
    def stored_nbytes(self) -> int:
        """Bytes that this rank stores, before anything is left out or compressed."""
        return sum(nbytes for _, nbytes in self.structure.objects)

    def raw(self, payload: memoryview, piece: int) -> memoryview:
        """Return the staged bytes of a piece."""
        begin, end = self._spans[piece]
        return payload[begin:end]

    def digests(self, payload: memoryview) -> Digests:
        """Return the digests of everything that is staged."""
        found = b"".join(digest(payload[begin:end]) if begin >= 0 else _NOT_STAGED for begin, end in self._spans)
        return np.frombuffer(found, np.uint8).reshape(-1, NBYTES)

    def places(self, digests: Digests) -> Places:
        """Return where the pieces lie when all that this rank stores is stored anew, as it is staged."""
        return Places(
            object=self.object.astype(np.int32),
            start=self.start,
            nbytes=self.nbytes,
            codec=np.zeros(len(self.nbytes), np.uint8),
            digest=digests,
            digested=self.at >= 0,
        )

    def _boxes(self) -> Boxes:
        ndim = np.array([len(each.shape) for each in self.structure.tensors], np.uint8)[self.tensor]
        # The numbers of all pieces follow each other, as many for each as its tensor has dimensions.
        within = np.arange(int(ndim.max(initial=0))) < ndim[:, None]
        offset, size = np.zeros(within.shape, np.int64), np.ones(within.shape, np.int64)
        offset[within] = _column(self.structure.offset)
        size[within] = _column(self.structure.size)
        return Boxes(tensor=self.tensor.astype(np.int32), ndim=ndim, offset=offset, size=size)


def _column(numbers: bytes) -> Column:
    return np.frombuffer(numbers, "<i8").astype(np.int64, copy=False)
