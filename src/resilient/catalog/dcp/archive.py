"""One entry of a DCP file: an archive as ``torch.save`` writes it, read with the checksums that are in it."""

from __future__ import annotations

import io
import zipfile
from typing import Final

import numpy as np

from resilient.catalog.dcp.unpickling import Refused, unpickle_tensor, unpickle_value
from resilient.errors import CorruptError, ErrorKind, UsageError
from resilient.format.digest import BytesLike
from resilient.format.dtypes import ITEMSIZE

_PICKLE: Final = "data.pkl"


class _Archive:
    """The records of an archive, each compared with its CRC-32 when it is read."""

    def __init__(self, data: BytesLike, where: str) -> None:
        self._where = where
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except Exception as error:  # boundary: zipfile fails in many ways on what is no archive
            raise self._damaged(error) from error
        names = [name for name in self._zip.namelist() if name.endswith(f"/{_PICKLE}")]
        if len(names) != 1:
            raise CorruptError(f"{where} is no archive of torch.save", kind=ErrorKind.MALFORMED)
        self._top = names[0].removesuffix(_PICKLE)

    def read(self, name: str) -> bytes:
        try:
            return self._zip.read(self._top + name)
        except Exception as error:  # boundary: as above
            raise self._damaged(error) from error

    def check_order(self) -> None:
        """Refuse numbers of the other byte order."""
        if f"{self._top}byteorder" in self._zip.namelist() and self.read("byteorder") != b"little":
            raise UsageError(f"{self._where} was written on a big-endian machine", kind=ErrorKind.UNSAVEABLE)

    def _damaged(self, error: Exception) -> CorruptError:
        return CorruptError(f"{self._where} is not what was written: {error}", kind=ErrorKind.BAD_DIGEST)


def read_tensor(data: BytesLike, dtype: str, shape: tuple[int, ...], where: str) -> memoryview:
    """Return the elements of an archived tensor, contiguous and row-major, as bytes.

    Raises:
        CorruptError: a checksum does not match, or it has another dtype or shape; ``where`` is named.
    """
    archive = _Archive(data, where)
    archive.check_order()
    try:
        stored = unpickle_tensor(archive.read(_PICKLE), where)
    except Refused as error:
        raise CorruptError(
            f"{where} is no plain tensor: it asks for {error.what}, which is refused", kind=ErrorKind.MALFORMED
        ) from error
    if (stored.dtype, stored.shape) != (dtype, shape):
        raise CorruptError(
            f"{where} is a tensor {stored.dtype}{list(stored.shape)}, not {dtype}{list(shape)} as .metadata says",
            kind=ErrorKind.MALFORMED,
        )
    itemsize = ITEMSIZE[dtype]
    try:
        # Elements are moved and never looked at, so bytes of the right size will do for every dtype.
        elements: np.ndarray[tuple[int, ...], np.dtype[np.void]] = np.ndarray(
            shape,
            np.dtype((np.void, itemsize)),
            archive.read(f"data/{stored.record}"),
            stored.offset * itemsize,
            [stride * itemsize for stride in stored.stride],
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise CorruptError(f"{where} has not the elements of its tensor: {error}", kind=ErrorKind.MALFORMED) from error
    return np.ascontiguousarray(elements).reshape(-1).view(np.uint8).data


def read_value(data: BytesLike, where: str) -> object:
    """Return an archived value that is no tensor.

    Raises:
        CorruptError: a checksum does not match, or it is no archive; ``where`` is named.
        Refused: it has an object of a type that is not among Python's own and numpy's.
    """
    return unpickle_value(_Archive(data, where).read(_PICKLE), where)
