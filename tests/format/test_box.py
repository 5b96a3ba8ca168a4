"""Boxes split, meet and cover like the arrays that they stand for."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from resilient.format.box import Box, intersect, overlaps, split, uncovered

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def boxes_within(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


def mark(shape: tuple[int, ...], box: Box) -> np.ndarray:
    array = np.zeros(shape, dtype=np.int64)
    array[box.relative_to(Box.whole(shape))] += 1
    return array


@given(st.data(), SHAPES, st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 300))
def test_the_pieces_of_a_split_back_to_back_are_the_box(
    data: st.DataObject, shape: tuple[int, ...], itemsize: int, max_nbytes: int
) -> None:
    box = data.draw(boxes_within(shape))
    array = np.arange(math.prod(shape)).reshape(shape)
    pieces = list(split(box, itemsize, max_nbytes))
    joined = [array[piece.relative_to(Box.whole(shape))].ravel() for piece in pieces]
    whole = array[box.relative_to(Box.whole(shape))].ravel()
    assert np.array_equal(np.concatenate([*joined, np.zeros(0, dtype=int)]), whole)
    assert all(piece.volume * itemsize <= max(itemsize, max_nbytes) for piece in pieces)


@given(st.data(), SHAPES)
def test_an_intersection_is_what_both_mark(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(boxes_within(shape)), data.draw(boxes_within(shape))
    both = mark(shape, a) * mark(shape, b)
    shared = intersect(a, b)
    assert np.array_equal(both, np.zeros(shape) if shared is None else mark(shape, shared))


@given(st.data(), SHAPES)
def test_overlaps_and_holes_are_found(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(st.lists(boxes_within(shape), max_size=5))
    marks = sum((mark(shape, box) for box in set(boxes)), np.zeros(shape, dtype=np.int64))
    found = overlaps(boxes)
    assert (found is not None) == bool((marks > 1).any())
    if found is None:
        assert uncovered(shape, boxes) == int((marks == 0).sum())
    else:
        assert intersect(*found) is not None
        assert found[0] != found[1]


def test_a_grid_of_a_thousand_by_a_thousand_is_checked_quickly() -> None:
    # The pairwise check of pytorch/pytorch#163548 took minutes at this size.
    boxes = [Box((row * 2, 0), (2, 1024)) for row in range(1024)] + [Box((0, 2048), (2048, 3))]
    assert overlaps(boxes) is None
    columns = [Box((0, column), (1024, 1)) for column in range(1024)]
    assert overlaps(columns) is None


def test_within() -> None:
    assert Box((1, 0), (2, 3)).within((3, 3))
    assert not Box((2, 0), (2, 3)).within((3, 3))
    assert not Box((-1,), (1,)).within((3,))
    assert not Box((), ()).within((1,))
