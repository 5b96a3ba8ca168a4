"""Reading the pickles inside a DCP checkpoint without running what they say.

The only module that has to do with pickle, which is a language of programs: they name functions and have them called.
Here they can name what is in the tables below and nothing else, and what they then get are stand-ins: inert records,
and functions that accept what torch and Python write and refuse the rest. Nothing of torch or of the user's is ever
looked up, imported or called. Nothing is written in this way.
"""

from __future__ import annotations

import datetime as dt
import io
import pickle
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NoReturn

import numpy as np

from resilient.errors import CorruptError, ErrorKind
from resilient.format.dtypes import ITEMSIZE


class Refused(Exception):  # noqa: N818 -- what is refused, not an error of the tree: callers turn it into one
    """A pickle asked for something that is in no table; ``what`` names it."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class _Sealed(type):
    """Of classes that a pickle cannot change: it may set attributes on whatever it gets hold of."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise TypeError(f"{cls.__name__} is sealed")


class Record(metaclass=_Sealed):
    """The attributes of an object of torch."""


class TensorRecord(Record):
    """A ``TensorStorageMetadata``."""


class ValueRecord(Record):
    """A ``BytesStorageMetadata``."""


class Properties(Record):
    """A ``TensorProperties``, of which only the dtype matters."""

    def __setstate__(self, state: object) -> None:
        assert isinstance(state, tuple)
        self.dtype = state[0]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """How a tensor lies in a record of its archive: in elements."""

    record: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def unpickle_metadata(data: bytes, where: str) -> Any:
    """Return the records of a ``.metadata`` file; attributes are as the file says, and still to be checked."""
    return _load(data, where, _METADATA, None)


def unpickle_tensor(data: bytes, where: str) -> StoredTensor:
    """Return how the one tensor of an archive lies in it."""
    found = _load(data, where, _TENSOR, _storage)
    if not isinstance(found, StoredTensor):
        raise CorruptError(f"{where} is no tensor", kind=ErrorKind.MALFORMED)
    return found


def unpickle_value(data: bytes, where: str) -> Any:
    """Return a value that is no tensor: of Python's own types and numpy's."""
    return _settled(_load(data, where, _VALUE, None))


def _load(data: bytes, where: str, names: Mapping[str, object], storage: Callable[[Any], object] | None) -> Any:
    try:
        return _Unpickler(data, names, storage).load()
    except Refused:
        raise
    except Exception as error:  # boundary: a damaged program may fail in any way
        raise CorruptError(
            f"{where} is not what was written: {type(error).__name__}: {error}", kind=ErrorKind.MALFORMED
        ) from error


class _Unpickler(pickle.Unpickler):
    """Knows a table of names, and no others."""

    def __init__(self, data: bytes, names: Mapping[str, object], storage: Callable[[Any], object] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        full = f"{_RENAMED.get(module, module)}.{name}"
        if full not in self._names:
            raise Refused(full)
        return self._names[full]

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None:
            raise Refused("a tensor inside another object")
        return self._storage(pid)


@dataclass(frozen=True, slots=True)
class _Named:
    """A type, where only its name is wanted."""

    name: str


class _Call(metaclass=_Sealed):
    """A function that a pickle may call and cannot change."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., object]) -> None:
        object.__setattr__(self, "_make", make)

    def __call__(self, *arguments: object) -> object:
        make: Callable[..., object] = object.__getattribute__(self, "_make")
        return make(*arguments)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise TypeError("a function is sealed")


# --- tensors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Storage:
    record: str
    dtype: str | None


def _storage(pid: Any) -> _Storage:
    what, kind, record, _, _ = pid
    if what != "storage" or not isinstance(record, str):
        raise ValueError(f"{pid!r} is no storage")
    return _Storage(record, kind)


def _rebuild_v2(storage: _Storage, offset: int, shape: Any, stride: Any, *_: object) -> StoredTensor:
    return _stored(storage.record, storage.dtype, offset, shape, stride)


def _rebuild_v3(
    storage: _Storage, offset: int, shape: Any, stride: Any, _grad: object, _hooks: object, dtype: str, *_: object
) -> StoredTensor:
    return _stored(storage.record, dtype, offset, shape, stride)


def _stored(record: str, dtype: object, offset: object, shape: Any, stride: Any) -> StoredTensor:
    numbers = (offset, *shape, *stride)
    if dtype not in ITEMSIZE or len(shape) != len(stride) or any(type(one) is not int or one < 0 for one in numbers):
        raise ValueError(f"no tensor has dtype {dtype!r}, shape {shape!r} and stride {stride!r}")
    assert isinstance(dtype, str)
    assert isinstance(offset, int)
    return StoredTensor(record, dtype, offset, tuple(shape), tuple(stride))


# --- values -----------------------------------------------------------------------------------------------------------


class _NumpyDtype(metaclass=_Sealed):
    """A dtype by name, and the byte order that is set on it afterwards."""

    def __init__(self, name: object, *_: object) -> None:
        if not isinstance(name, str):
            raise TypeError(f"no dtype is called {name!r}")
        self._name = name

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        self._name = (order if order in {"<", ">"} else "") + self._name

    def made(self) -> np.dtype[Any]:
        found = np.dtype(self._name)
        if found.hasobject or found.fields is not None:
            raise Refused(f"numpy.dtype {self._name}")
        return found


class _NumpyArray(metaclass=_Sealed):
    """An array, whose content is set on it afterwards."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        found = np.frombuffer(data, dtype.made())
        self.array = found.reshape(shape, order="F" if fortran else "C").copy()


def _numpy_scalar(dtype: Any, data: bytes) -> object:
    (scalar,) = np.frombuffer(data, dtype.made())
    return scalar


def _of_list(kind: Callable[..., object]) -> _Call:
    """Return a maker of containers from lists only: from a range, one could be made that no memory can hold."""

    def make(members: object = (), *more: object) -> object:
        if not isinstance(members, list | tuple | dict):
            raise TypeError(f"members are in a list, not in a {type(members).__name__}")
        return kind(members, *more)

    return _Call(make)


def _bytes(text: str, encoding: str) -> bytes:
    return text.encode({"latin1": "latin1", "latin-1": "latin1"}[encoding])


def _bytearray(content: Any = b"", encoding: str | None = None) -> bytearray:
    if not isinstance(content, bytes | str):
        raise TypeError("a bytearray is made of bytes")
    return bytearray(content if isinstance(content, bytes) else _bytes(content, encoding or ""))


def _settled(node: Any) -> Any:
    """Return a value with numpy's arrays in place of what stood for them; no container is shared with what was read."""
    match node:
        case _NumpyArray():
            return node.array
        case OrderedDict() | Counter():
            return type(node)((key, _settled(child)) for key, child in node.items())
        case dict():
            return {key: _settled(child) for key, child in node.items()}
        case list():
            return [_settled(child) for child in node]
        case tuple():
            return tuple(_settled(child) for child in node)
    if isinstance(node, _Named | _Call | _NumpyDtype | type):
        raise Refused(f"a type or function as a value ({getattr(node, 'name', node)})")
    return node


# --- what may be named ------------------------------------------------------------------------------------------------

_RENAMED: Final = MappingProxyType(
    {
        "__builtin__": "builtins",  # as Python 2 called it, and protocol 2 still does
        "pathlib._local": "pathlib",  # Python 3.13
        "numpy.core.multiarray": "numpy._core.multiarray",  # numpy 1
    }
)
_DTYPES: Final = {f"torch.{name}": name for name in ITEMSIZE}
_SIZE: Final = _Call(lambda sizes=(): tuple(sizes))
_DCP: Final = "torch.distributed.checkpoint"
_METADATA: Final[dict[str, object]] = {
    **_DTYPES,
    **{
        f"{_DCP}.metadata.{name}": Record
        for name in ("Metadata", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta")
    },
    f"{_DCP}.metadata.TensorStorageMetadata": TensorRecord,
    f"{_DCP}.metadata.BytesStorageMetadata": ValueRecord,
    f"{_DCP}.metadata.TensorProperties": Properties,
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING": _Call(lambda number: number),
    f"{_DCP}.filesystem._StorageInfo": Record,
    "torch.serialization._get_layout": _Call(lambda name: name),
    "torch.Size": _SIZE,
    "collections.OrderedDict": OrderedDict,
    **{f"pathlib.{name}": _Call(lambda *parts: "/".join(parts)) for name in ("Path", "PosixPath", "WindowsPath")},
}
_TENSOR: Final[dict[str, object]] = {
    **_DTYPES,
    "torch._utils._rebuild_tensor_v2": _Call(_rebuild_v2),
    "torch._utils._rebuild_tensor_v3": _Call(_rebuild_v3),
    "torch._utils._rebuild_parameter": _Call(lambda tensor, *_: tensor),
    "torch.Size": _SIZE,
    "torch.storage.UntypedStorage": None,
    "collections.OrderedDict": OrderedDict,
    **{
        f"torch.{name}Storage": dtype
        for name, dtype in {
            "Double": "float64",
            "Float": "float32",
            "Half": "float16",
            "BFloat16": "bfloat16",
            "Long": "int64",
            "Int": "int32",
            "Short": "int16",
            "Char": "int8",
            "Byte": "uint8",
            "Bool": "bool",
            "ComplexFloat": "complex64",
            "ComplexDouble": "complex128",
        }.items()
    },
}
_VALUE: Final[dict[str, object]] = {
    "_codecs.encode": _Call(_bytes),
    "builtins.bytes": _Call(lambda: b""),  # protocol 2 has no other word for no bytes
    "builtins.bytearray": _Call(_bytearray),
    "builtins.complex": complex,
    "builtins.range": range,
    "builtins.xrange": range,
    "builtins.slice": slice,
    "builtins.set": _of_list(set),
    "builtins.frozenset": _of_list(frozenset),
    # What makes the missing entries of a defaultdict is not kept.
    **{f"builtins.{name}": _Named(name) for name in ("int", "float", "str", "bool", "list", "dict", "tuple")},
    "collections.defaultdict": _Call(lambda *_: {}),
    "collections.Counter": _of_list(Counter),
    "collections.OrderedDict": OrderedDict,
    "collections.deque": _of_list(deque),
    "datetime.date": dt.date,
    "datetime.datetime": dt.datetime,
    "datetime.timedelta": dt.timedelta,
    "datetime.timezone": dt.timezone,
    "numpy.dtype": _NumpyDtype,
    "numpy.ndarray": _Named("numpy.ndarray"),
    "numpy._core.multiarray.scalar": _Call(_numpy_scalar),
    "numpy._core.multiarray._reconstruct": _Call(lambda *_: _NumpyArray()),
}
