"""Python values to bytes and back, typed and without pickle: what format version 1 can store beside tensors.

MessagePack, with extension types for what it cannot tell apart: tuples, sets, big integers, dictionaries with other
than string keys, numpy scalars and arrays, dates, enums. ``inf``, ``nan`` (all its bits) and ``-0.0`` come back as they
were. A type that is not here is refused by name; `register` adds one.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from enum import Enum
from typing import Any, Final

import msgspec
import numpy as np

from resilient.errors import CorruptError, ErrorKind, UsageError

_INT64: Final = range(-(2**63), 2**63)
_MAX_DEPTH: Final = 100

# Extension codes are part of the format: append only.
_TUPLE, _SET, _FROZENSET, _BIGINT, _COMPLEX, _MAPPING, _NUMPY, _DATETIME, _DATE, _TIMEDELTA, _ENUM, _NAMED = range(
    1, 13
)
_MAPPINGS: Final[dict[str, type]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter, "defaultdict": dict}


class Unsaveable(Exception):  # noqa: N818 -- what it is about, not an error of the tree: callers turn it into one
    """A value of a type that cannot be stored; ``path`` are the keys that lead to it."""

    def __init__(self, path: tuple[object, ...], value: object, reason: str = "") -> None:
        super().__init__(path, value, reason)
        self.path = path
        self.value = value
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value whose type nobody registered in this process; the catalog side shows it and never needs more."""

    tag: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class _Codec:
    tag: str
    to_value: Callable[[Any], object]
    from_value: Callable[[Any], object]


_by_type: dict[type, _Codec] = {}
_by_tag: dict[str, _Codec] = {}


def register(kind: type, tag: str, to_value: Callable[[Any], object], from_value: Callable[[Any], object]) -> None:
    """Teach the codec a type: ``to_value`` turns an instance into storable values, ``from_value`` turns them back.

    ``tag`` is stored and must stay the same for ever. Subclasses are not included.
    """
    codec = _Codec(tag, to_value, from_value)
    _by_type[kind] = codec
    _by_tag[tag] = codec


def encode(value: object) -> bytes:
    """Return the stored form of a value; equal values of equal types give equal bytes.

    Raises:
        Unsaveable: a part of it has a type that cannot be stored.
    """
    return msgspec.msgpack.encode(_lower(value, ()))


def unknown(tag: str) -> bytes:
    """Return the stored form of a value of a type that nobody registered: `decode` refuses it by this name."""
    return msgspec.msgpack.encode(_ext(_NAMED, [tag, None]))


def decode(data: bytes, *, opaque: bool = False) -> Any:
    """Return the value that `encode` was given.

    Args:
        data: what `encode` returned.
        opaque: return `Opaque` for types that nobody registered here, instead of raising.

    Raises:
        CorruptError: the bytes are not a stored value.
        UsageError: a type that is not registered or an enum that is not imported in this process.
    """

    def ext_hook(code: int, payload: memoryview) -> object:
        return _raise(code, bytes(payload), opaque=opaque)

    try:
        return msgspec.msgpack.decode(data, ext_hook=ext_hook, strict=False)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise CorruptError(f"a stored value does not decode: {error}", kind=ErrorKind.MALFORMED) from error


def _ext(code: int, content: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(content))


def _lower(value: object, path: tuple[object, ...]) -> object:  # noqa: C901, PLR0911, PLR0912 -- one branch a type reads best in one place
    if len(path) > _MAX_DEPTH:
        raise Unsaveable(path, value, f"nested deeper than {_MAX_DEPTH} levels, or contains itself")
    kind = type(value)
    if value is None or kind is bool or kind is float or kind is str:
        return value
    if kind is bytes:
        return value
    if kind is int:
        assert isinstance(value, int)
        return value if value in _INT64 else _ext(_BIGINT, str(value))
    if kind is list:
        assert isinstance(value, list)
        return [_lower(each, (*path, i)) for i, each in enumerate(value)]
    if kind is tuple:
        assert isinstance(value, tuple)
        return _ext(_TUPLE, [_lower(each, (*path, i)) for i, each in enumerate(value)])
    if kind is dict or kind in (OrderedDict, Counter, defaultdict):
        assert isinstance(value, dict)
        return _lower_mapping(value, path)
    if kind in (set, frozenset):
        assert isinstance(value, set | frozenset)
        members = sorted((_lower(each, path) for each in value), key=msgspec.msgpack.encode)
        return _ext(_SET if kind is set else _FROZENSET, members)
    if kind is complex:
        assert isinstance(value, complex)
        return _ext(_COMPLEX, [value.real, value.imag])
    if isinstance(value, np.ndarray | np.generic):
        return _lower_numpy(value, path)
    if kind is datetime:
        assert isinstance(value, datetime)
        return _ext(_DATETIME, value.isoformat())
    if kind is date:
        assert isinstance(value, date)
        return _ext(_DATE, value.isoformat())
    if kind is timedelta:
        assert isinstance(value, timedelta)
        return _ext(_TIMEDELTA, [value.days, value.seconds, value.microseconds])
    if isinstance(value, Enum):
        return _ext(_ENUM, [kind.__module__, kind.__qualname__, value.name])
    codec = _by_type.get(kind)
    if codec is None:
        raise Unsaveable(path, value)
    return _ext(_NAMED, [codec.tag, _lower(codec.to_value(value), path)])


def _lower_mapping(value: dict[Any, Any], path: tuple[object, ...]) -> object:
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _lower(each, (*path, key)) for key, each in value.items()}
    pairs = [[_lower(key, path), _lower(each, (*path, key))] for key, each in value.items()]
    return _ext(_MAPPING, [type(value).__name__, pairs])


def _lower_numpy(value: np.ndarray[Any, Any] | np.generic, path: tuple[object, ...]) -> object:
    if value.dtype.hasobject or value.dtype.fields is not None:
        raise Unsaveable(path, value, f"a numpy array of dtype {value.dtype}")
    # newbyteorder: what is stored is little-endian wherever it was written.
    array = np.asarray(value)
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    scalar = isinstance(value, np.generic)
    return _ext(_NUMPY, [little.dtype.str, list(array.shape), little.tobytes(), scalar])


def _raise(code: int, payload: bytes, *, opaque: bool) -> object:  # noqa: C901, PLR0911, PLR0912 -- the mirror image of _lower
    content: Any = msgspec.msgpack.decode(payload, ext_hook=lambda c, p: _raise(c, bytes(p), opaque=opaque))
    match code:
        case 1:
            return tuple(content)
        case 2:
            return set(content)
        case 3:
            return frozenset(content)
        case 4:
            return int(content)
        case 5:
            return complex(*content)
        case 6:
            return _raise_mapping(*content)
        case 7:
            dtype, shape, data, scalar = content
            array = np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape).copy()
            return array[()] if scalar else array
        case 8:
            return datetime.fromisoformat(content)
        case 9:
            return date.fromisoformat(content)
        case 10:
            days, seconds, microseconds = content
            return timedelta(days=days, seconds=seconds, microseconds=microseconds)
        case 11:
            return _raise_enum(*content, opaque=opaque)
        case 12:
            tag, lowered = content
            codec = _by_tag.get(tag)
            if codec is not None:
                return codec.from_value(lowered)
            if opaque:
                return Opaque(tag, payload)
            raise UsageError(
                f"a stored value has the type {tag!r}, which nobody registered in this process",
                kind=ErrorKind.UNSAVEABLE,
                hint="import the module that registers it before loading",
            )
        case _:
            raise ValueError(f"unknown extension code {code}")


def _raise_mapping(name: str, pairs: list[list[Any]]) -> object:
    if name not in _MAPPINGS:
        raise ValueError(f"unknown mapping {name!r}")
    if name == "Counter":
        return Counter(dict(map(tuple, pairs)))
    return _MAPPINGS[name]((key, value) for key, value in pairs)


def _raise_enum(module: str, qualname: str, member: str, *, opaque: bool) -> object:
    # Only what is imported already: importing a module that a file names would be running what the file says.
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, Enum) and member in found.__members__:
        return found[member]
    if opaque:
        return Opaque(f"{module}.{qualname}", member.encode())
    raise UsageError(
        f"a stored value is {module}.{qualname}.{member}, which is not imported in this process",
        kind=ErrorKind.UNSAVEABLE,
        hint=f"import {module} before loading",
    )


register(deque, "deque", lambda value: [list(value), value.maxlen], lambda pair: deque(pair[0], maxlen=pair[1]))
register(range, "range", lambda value: [value.start, value.stop, value.step], lambda triple: range(*triple))
register(slice, "slice", lambda value: [value.start, value.stop, value.step], lambda triple: slice(*triple))
register(bytearray, "bytearray", bytes, bytearray)
