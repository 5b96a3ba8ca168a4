"""Distinct rows are found as numpy finds them, for whatever whole numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.format.columns import distinct


def agrees(rows: npt.NDArray[np.int64]) -> None:
    first, which = distinct(rows)
    _, expected_first, expected_which = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    assert first.tolist() == expected_first.tolist()
    assert which.tolist() == expected_which.reshape(-1).tolist()


@pytest.mark.parametrize("extreme", [3, 1 << 20, (1 << 63) - 1])
@given(data=st.data(), columns=st.integers(1, 9))
def test_distinct_rows_are_those_that_numpy_finds(data: st.DataObject, columns: int, extreme: int) -> None:
    number = st.sampled_from([-extreme - 1, -1, 0, 1, extreme]) | st.integers(-2, 2)
    rows = data.draw(st.lists(st.lists(number, min_size=columns, max_size=columns), max_size=12))
    agrees(np.array(rows, np.int64).reshape(len(rows), columns))


def test_no_rows_and_rows_that_are_all_alike() -> None:
    assert [part.tolist() for part in distinct(np.zeros((0, 3), np.int64))] == [[], []]
    assert [part.tolist() for part in distinct(np.full((4, 3), 7))] == [[0], [0, 0, 0, 0]]
