"""Values come back equal, of the same type, and nothing that is stored can run."""

from __future__ import annotations

import contextlib
import math
import pickle
import struct
from collections import Counter, OrderedDict, deque
from datetime import UTC, date, datetime, timedelta
from enum import Enum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.errors import CorruptError, UsageError
from resilient.format.values import Opaque, Unsaveable, decode, encode


class Color(Enum):
    RED = 1


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.datetimes(timezones=st.just(UTC))
    | st.dates()
    | st.timedeltas()
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS | st.frozensets(st.integers() | st.text()),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner) | st.dictionaries(st.text(), inner)
    ),
    max_leaves=20,
)


def same(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, list | tuple):
        assert isinstance(b, list | tuple)
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        assert isinstance(b, dict)
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


@given(VALUES)
def test_a_value_comes_back_equal_and_of_the_same_type(value: object) -> None:
    assert same(decode(encode(value)), value)
    assert encode(decode(encode(value))) == encode(value)


@pytest.mark.parametrize(
    "value",
    [
        -0.0,
        float("inf"),
        2**80,
        -(2**63) - 1,
        2**63 - 1,
        Counter({3: 1, "a": 2}),
        OrderedDict(b=1, a=2),
        {1: {2: 3}},
        deque([1, 2], maxlen=3),
        range(3, 9, 2),
        {1, 2},
        datetime(2026, 1, 2, 3, 4, 5, 6),  # noqa: DTZ001 -- a naive one must stay naive
        date(2026, 1, 2),
        timedelta(days=-1, microseconds=7),
        Color.RED,
        bytearray(b"x"),
    ],
    ids=repr,
)
def test_special_values_come_back(value: object) -> None:
    assert same(decode(encode(value)), value)


def test_all_bits_of_a_nan_come_back() -> None:
    (odd,) = struct.unpack("<d", struct.pack("<Q", 0x7FF8DEADBEEF0001))
    assert math.isnan(odd)
    assert struct.pack("<d", decode(encode(odd))) == struct.pack("<d", odd)


@pytest.mark.parametrize(
    "array",
    [
        np.float32(2.5),
        np.int64(7),
        np.bool_(True),
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.arange(6, dtype=">i4"),
        np.zeros((0, 3)),
        np.array(5),
        np.array(["2026-01-01"], dtype="datetime64[D]"),
        np.array(["ab", "c"]),
    ],
    ids=lambda array: f"{type(array).__name__}-{array.dtype}",
)
def test_numpy_values_come_back(array: np.ndarray | np.generic) -> None:
    back = decode(encode(array))
    assert type(back) is type(array)
    assert back.dtype.newbyteorder("=") == array.dtype.newbyteorder("=")
    assert np.shape(back) == np.shape(array)
    assert np.array_equal(back, array)


@pytest.mark.parametrize(
    "value",
    [lambda: 0, object(), open, Color, np.array([object()])],
    ids=["lambda", "object", "function", "class", "object-array"],
)
def test_what_cannot_be_stored_is_named_with_its_path(value: object) -> None:
    with pytest.raises(Unsaveable) as caught:
        encode({"a": [1, {"b": value}]})
    assert caught.value.path == ("a", 1, "b")


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(Unsaveable, match="contains itself"):
        encode(loop)


def test_an_enum_that_is_not_imported_is_not_imported_for_it() -> None:
    stored = encode(Color.RED).replace(b"test_values", b"test_others")
    with pytest.raises(UsageError, match="not imported"):
        decode(stored)
    assert isinstance(decode(stored, opaque=True), Opaque)


@given(st.binary(max_size=60))
def test_garbage_is_an_error_and_never_runs(data: bytes) -> None:
    with contextlib.suppress(CorruptError, UsageError):
        decode(data)


def test_a_pickle_is_garbage() -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (pytest.fail, ("it ran",))

    with pytest.raises(CorruptError):
        decode(pickle.dumps(Bomb()))
