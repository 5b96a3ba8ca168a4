"""Encoded chunks come back bit-equal; whatever else comes is refused or caught by the digest, within bounded memory."""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from resilient.errors import CorruptError, ErrorKind
from resilient.format.codec import BYTE_GROUPED_ZSTD, RAW, decode, encode
from resilient.format.digest import digest
from resilient.format.dtypes import ITEMSIZE

ITEMSIZES = sorted(set(ITEMSIZE.values()))


def weights(count: int, itemsize: int, *, seed: int = 0) -> bytes:
    """Return numbers as they are in trained models: noise, but for the byte with sign and exponent."""
    rng = np.random.default_rng(seed)
    numbers = (rng.standard_normal(max(1, count)) * 0.02).astype(np.float64)
    if itemsize == 2:  # bfloat16 is the upper half of float32
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)[:count].tobytes()
    kinds = {1: np.int8, 4: np.float32, 8: np.float64, 16: np.complex128}
    return (numbers * 100 if itemsize == 1 else numbers).astype(kinds[itemsize])[:count].tobytes()


def decoded(stored: bytes, nbytes: int, itemsize: int) -> bytes:
    """Decode between two guards, which must stay as they are."""
    room = bytearray(b"\xa5" * (nbytes + 64))
    try:
        decode(BYTE_GROUPED_ZSTD, memoryview(stored), memoryview(room)[32 : 32 + nbytes], itemsize)
    finally:
        assert room[:32] + room[32 + nbytes :] == b"\xa5" * 64, "it wrote beyond its destination"
    return bytes(room[32 : 32 + nbytes])


@pytest.mark.parametrize(("itemsize", "ratio"), [(2, 1.45), (4, 1.15), (8, 1.05)])
def test_weights_shrink_by_their_exponents(itemsize: int, ratio: float) -> None:
    raw = weights(1 << 18, itemsize)
    stored = encode(memoryview(raw), itemsize, 1)
    assert stored is not None
    assert len(raw) / len(stored) >= ratio
    assert decoded(stored, len(raw), itemsize) == raw


def test_what_does_not_shrink_stays_raw() -> None:
    noise = np.random.default_rng(0).bytes(1 << 20)
    for itemsize in ITEMSIZES:
        assert encode(memoryview(noise), itemsize, 1) is None
    assert encode(memoryview(bytes(100)), 4, 1) is None, "too small to be worth a header"


@given(
    itemsize=st.sampled_from(ITEMSIZES),
    level=st.sampled_from([1, 3]),
    count=st.integers(0, 70_000),
    tail=st.integers(0, 15),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_length_and_itemsize_comes_back(itemsize: int, level: int, count: int, tail: int, seed: int) -> None:
    raw = weights(count, itemsize, seed=seed) + bytes(range(tail))
    stored = encode(memoryview(raw), itemsize, level)
    if stored is not None:
        assert len(stored) < len(raw)
        assert decoded(stored, len(raw), itemsize) == raw


def test_unaligned_memory_is_read_and_written_all_the_same() -> None:
    raw = weights(20_000, 4)
    room = bytearray(b"x" + raw)
    stored = encode(memoryview(room)[1:], 4, 1)
    assert stored is not None
    room[1:] = bytes(len(raw))
    decode(BYTE_GROUPED_ZSTD, memoryview(b"y" + stored)[1:], memoryview(room)[1:], 4)
    assert room == b"x" + raw


@given(data=st.data(), itemsize=st.sampled_from(ITEMSIZES))
def test_a_flipped_bit_is_refused_or_changes_the_digest(data: st.DataObject, itemsize: int) -> None:
    raw = weights(8192, itemsize) if itemsize > 1 else bytes(8192)
    stored = encode(memoryview(raw), itemsize, 1)
    assert stored is not None
    flipped = bytearray(stored)
    # Mostly in the header and at the planes' beginnings, where the structure is.
    place = data.draw(st.one_of(st.integers(0, min(200, len(stored) - 1)), st.integers(0, len(stored) - 1)))
    flipped[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = decoded(bytes(flipped), len(raw), itemsize)
    except CorruptError:
        return
    # A bit that stands for nothing (zstd reserves one, and does not look at it) changes nothing either.
    assert digest(found) != digest(raw) or found == raw


@given(stored=st.binary(max_size=300), nbytes=st.integers(0, 300), itemsize=st.sampled_from(ITEMSIZES))
def test_any_bytes_are_refused_or_decoded_within_bounds(stored: bytes, nbytes: int, itemsize: int) -> None:
    with suppress(CorruptError):
        decoded(stored, nbytes, itemsize)


@pytest.mark.parametrize("cut", ["shorter", "longer"])
def test_truncated_and_extended_bytes_are_refused(cut: str) -> None:
    raw = weights(5000, 2)
    stored = encode(memoryview(raw), 2, 1)
    assert stored is not None
    for length in (0, 1, 10, len(stored) - 1):
        with pytest.raises(CorruptError):
            decoded(stored[:length] if cut == "shorter" else stored + bytes(length + 1), len(raw), 2)
    with pytest.raises(CorruptError):
        decoded(stored, len(raw) + (2 if cut == "longer" else -2), 2)


@pytest.mark.parametrize("claims_its_size", [True, False])
def test_a_bomb_takes_no_memory(claims_its_size: bool) -> None:
    plane = zstandard.ZstdCompressor(write_content_size=claims_its_size).compress(bytes(256 << 20))
    stored = bytes((1,)) + struct.pack("<BQ", 1, len(plane)) + plane
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError):
            decoded(stored, 1000, 1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_raw_is_copied_only_at_its_exact_length() -> None:
    into = bytearray(4)
    decode(RAW, memoryview(b"abcd"), memoryview(into), 4)
    assert into == b"abcd"
    with pytest.raises(CorruptError):
        decode(RAW, memoryview(b"abc"), memoryview(into), 1)


def test_a_codec_of_a_later_version_is_refused_by_name() -> None:
    with pytest.raises(CorruptError, match="codec 7") as caught:
        decode(7, memoryview(b""), memoryview(bytearray()), 1)
    assert caught.value.kind is ErrorKind.NEWER_FORMAT


def test_the_layout_is_the_one_of_the_specification() -> None:
    words = np.arange(5000, dtype="<u2") % 7
    top = zstandard.ZstdCompressor().compress(bytes(5000))
    low = words.astype(np.uint8).tobytes()
    stored = bytes((2,)) + struct.pack("<BQBQ", 0, 5000, 1, len(top)) + low + top + b"t"
    assert decoded(stored, 10_001, 2) == words.tobytes() + b"t"
    written = encode(memoryview(words.tobytes() + b"t"), 2, 1)
    assert written is not None
    assert written[0] == 2
    lengths = [length for _, length in struct.iter_unpack("<BQ", written[1:19])]
    assert len(written) == 19 + sum(lengths) + 1
    assert written[-1:] == b"t"
