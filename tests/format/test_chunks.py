"""A table of chunks is a sequence of chunks, comes back from its stored form, and finds what meets a box."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.format import chunks as module
from resilient.format.box import intersect
from resilient.format.chunks import NOT_HERE, Boxes, Chunk, Chunks
from resilient.format.columns import pack_table, unpack_table


def some_chunks(rng: random.Random, count: int, *, largest: int = 9) -> list[Chunk]:
    """Return chunks of tensors with different dimensions, in no order."""
    found = []
    for _ in range(count):
        ndim = rng.randint(0, 3)
        found.append(
            Chunk(
                tensor=4 * ndim + rng.randint(0, 2),
                offset=tuple(rng.randint(0, largest) for _ in range(ndim)),
                size=tuple(rng.randint(0, largest) for _ in range(ndim)),
                object=rng.choice([NOT_HERE, 0, 1, 70_000]),
                start=rng.randrange(1 << 40),
                nbytes=rng.randrange(1 << 33),
                digest=rng.choice([b"", rng.randbytes(16)]),
                codec=rng.choice([0, 1, 200]),
            )
        )
    return found


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), large=st.booleans())
def test_a_table_is_the_sequence_it_was_made_of_also_after_it_was_stored(seed: int, large: bool) -> None:
    rng = random.Random(seed)
    rows = some_chunks(rng, rng.randint(0, 20), largest=1 << 40 if large else 9)
    for table in (Chunks.of(rows), unpack_table(pack_table(Chunks.of(rows)))):
        assert list(table) == rows, f"seed {seed}"
        assert table == Chunks.of(rows)
        assert len(table) == len(rows)
        assert [table[row] for row in range(-len(rows), len(rows))] == rows * 2
        assert list(table[1:-1]) == rows[1:-1]
        assert list(Chunks.joined([table, Chunks.of(rows[:3])])) == [*rows, *rows[:3]]
    with pytest.raises(IndexError):
        Chunks.of(rows)[len(rows)]


@pytest.mark.parametrize("pairs_at_once", [5, 1 << 20])
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), ordered=st.booleans(), large=st.booleans())
def test_what_meets_a_box_is_what_shares_an_element_with_it(
    pairs_at_once: int, seed: int, ordered: bool, large: bool
) -> None:
    rng = random.Random(seed)
    rows = some_chunks(rng, rng.randint(0, 25), largest=1 << 60 if large else 9)
    if ordered:
        rows.sort(key=lambda row: (row.tensor, row.offset))
    wanted = some_chunks(rng, rng.randint(0, 6), largest=1 << 60 if large else 9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PAIRS_AT_ONCE", pairs_at_once)
        pairs = Boxes.of([row.tensor for row in rows], [row.box for row in rows]).meeting(
            Boxes.of([one.tensor for one in wanted], [one.box for one in wanted])
        )
    found = set(zip(*(column.tolist() for column in pairs), strict=True))
    assert found == {
        (at, which)
        for at, row in enumerate(rows)
        for which, one in enumerate(wanted)
        if row.tensor == one.tensor and intersect(row.box, one.box) is not None
    }, f"seed {seed}"
    assert len(found) == len(pairs[0])
    assert (np.diff(pairs[1]) >= 0).all()


def test_a_digest_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="16"):
        Chunks.of([Chunk(0, (), (), 0, 0, 4, b"short")])
