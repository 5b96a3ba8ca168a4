"""What a DCP checkpoint says of itself: its ``.metadata`` file, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from resilient.catalog.dcp.names import Name, name_of
from resilient.catalog.dcp.unpickling import Refused, TensorRecord, ValueRecord, unpickle_metadata
from resilient.errors import CorruptError, ErrorKind, UsageError
from resilient.format.box import Box, overlaps, uncovered
from resilient.format.dtypes import ITEMSIZE
from resilient.store.keys import checked_key

METADATA: Final = ".metadata"


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Some bytes of a file."""

    file: str
    start: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.file}, bytes {self.start} to {self.start + self.nbytes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpTensor:
    """A global tensor, and where the archives of its parts are."""

    at: Name
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[Box, Range], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpValue:
    """An entry that is no tensor, and where its archive is."""

    at: Name
    range: Range


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpMetadata:
    """All that a checkpoint holds."""

    tensors: tuple[DcpTensor, ...]
    values: tuple[DcpValue, ...]


def parse(data: bytes, where: str) -> DcpMetadata:
    """Return what a ``.metadata`` file says, and run nothing of it.

    Raises:
        CorruptError: it names something that no checkpoint needs (that is not looked up), is damaged, contradicts
            itself, or lists an entry without saying where it is stored.
        UsageError: it was written with an extension (compressed streams) that this library does not read.
    """
    try:
        found = unpickle_metadata(data, where)
    except Refused as error:
        raise CorruptError(
            f"{where} asks for {error.what}, which no checkpoint needs: refused, and not run",
            kind=ErrorKind.MALFORMED,
            hint="find out who wrote this file",
        ) from error
    try:
        return _checked(found, where)
    except (AttributeError, TypeError, ValueError, AssertionError) as error:
        if isinstance(error, UsageError):
            raise
        raise CorruptError(f"{where} does not describe a checkpoint: {error}", kind=ErrorKind.MALFORMED) from error


def _checked(found: Any, where: str) -> DcpMetadata:
    version = getattr(found, "version", None)
    if version is not None and not str(version).startswith("1."):
        raise CorruptError(f"{where} has version {version}, and 1 is known", kind=ErrorKind.NEWER_FORMAT)
    paths = found.planner_data if isinstance(found.planner_data, Mapping) else {}
    ranges = {(index.fqn, _offset(index)): _range(info, index.fqn) for index, info in found.storage_data.items()}
    tensors: list[DcpTensor] = []
    values: list[DcpValue] = []
    for fqn, record in found.state_dict_metadata.items():
        at = name_of(_text(fqn), paths.get(fqn))
        if isinstance(record, ValueRecord):
            values.append(DcpValue(at=at, range=_stored(ranges, fqn, None, where)))
        elif isinstance(record, TensorRecord):
            tensors.append(_tensor(record, at, fqn, ranges, where))
        else:
            raise TypeError(f"{fqn} is a {type(record).__name__}")
    return DcpMetadata(tensors=tuple(tensors), values=tuple(values))


_Ranges = Mapping[tuple[str, tuple[int, ...] | None], Range]


def _tensor(record: Any, at: Name, fqn: str, ranges: _Ranges, where: str) -> DcpTensor:
    dtype, shape = record.properties.dtype, _sizes(record.size)
    if dtype not in ITEMSIZE:
        raise ValueError(f"{fqn} has dtype {dtype!r}")
    boxes = list(dict.fromkeys(Box(_sizes(chunk.offsets), _sizes(chunk.sizes)) for chunk in record.chunks))
    for box in boxes:
        if not box.within(shape):
            raise ValueError(f"{fqn} has a part {box}, which does not lie in {list(shape)}")
    if overlaps(boxes) is not None:
        raise ValueError(f"{fqn} has parts that overlap")
    missing = uncovered(shape, boxes)
    if missing:
        raise CorruptError(f"{where}: {missing} elements of {fqn!r} are stored nowhere", kind=ErrorKind.INCOMPLETE)
    parts = tuple((box, _stored(ranges, fqn, box.offset, where)) for box in boxes if box.volume)
    return DcpTensor(at=at, dtype=dtype, shape=shape, parts=parts)


def _stored(ranges: _Ranges, fqn: str, offset: tuple[int, ...] | None, where: str) -> Range:
    found = ranges.get((fqn, offset))
    if found is None:
        part = "" if offset is None else f" (its part at {list(offset)})"
        raise CorruptError(
            f"{where} lists {fqn!r}{part} and not where it is stored: the save lost it",
            kind=ErrorKind.INCOMPLETE,
            hint="use another checkpoint",
        )
    return found


def _range(info: Any, fqn: str) -> Range:
    if getattr(info, "transform_descriptors", None):
        raise UsageError(
            f"{fqn!r} was written with the extensions {', '.join(map(str, info.transform_descriptors))}",
            kind=ErrorKind.UNSAVEABLE,
            hint="load it with torch.distributed.checkpoint and save it again without them",
        )
    start, nbytes = _sizes((info.offset, info.length))
    return Range(file=checked_key(_text(info.relative_path)), start=start, nbytes=nbytes)


def _offset(index: Any) -> tuple[int, ...] | None:
    offset = getattr(index, "offset", None)
    return None if offset is None else _sizes(offset)


def _sizes(numbers: Any) -> tuple[int, ...]:
    found = tuple(numbers)
    if any(type(one) is not int or one < 0 for one in found):
        raise ValueError(f"{found} are no sizes")
    return found


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{value!r} is no name")
    return value
