"""Which of many boxes may overlap, found in near-linear time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from resilient.format.chunks import Boxes

_MAX_KEY = 1 << 62


def unseparated(boxes: Boxes) -> npt.NDArray[np.int64]:
    """Return the rows of which it is not proven that they share no element with another row of their tensor.

    Boxes are told apart by cutting the space between them, along one dimension after the other, as long as any cut
    separates some. That takes one sort for each level of cuts and separates all that is made by cutting: grids, uneven
    ones too, and shards that are cut into chunks, each in another way. What remains overlaps or is entangled as a
    pinwheel is, and needs to be compared box by box. Boxes must not be empty.
    """
    rows = np.arange(len(boxes))
    # Rows that nothing has separated yet have one label.
    label = boxes.tensor.astype(np.int64)
    offset, end = boxes.offset, boxes.end
    dimensions = offset.shape[1]
    axis = fruitless = 0
    rows, label = _together(rows, label)
    while len(rows) and fruitless < dimensions:
        low, high = offset[rows, axis].astype(np.int64), end[rows, axis]
        span = int(high.max()) + 1
        if (int(label.max()) + 1) * span > _MAX_KEY:
            return np.sort(rows)  # numbers too large to be told apart in one column: compare them box by box
        key = label * span + low
        if not (key[1:] >= key[:-1]).all():
            order = np.argsort(key, kind="stable")
            rows, label, key, high = rows[order], label[order], key[order], high[order]
        reach = np.maximum.accumulate(label * span + high)
        cut = np.concatenate([[False], key[1:] >= reach[:-1]])
        parts = np.cumsum(cut)
        # A border between labels is a cut too, so only more cuts than that are progress.
        fruitless = 0 if int(parts[-1]) > int(label[-1]) - int(label[0]) else fruitless + 1
        rows, label = _together(rows, parts)
        axis = (axis + 1) % dimensions
    return np.sort(rows)


def _together(
    rows: npt.NDArray[np.int64], label: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the rows that are not alone under their label, and labels counted anew, in rising order."""
    if (label[1:] < label[:-1]).any():
        order = np.argsort(label, kind="stable")
        rows, label = rows[order], label[order]
    same = label[1:] == label[:-1]
    beside = np.zeros(len(rows) + 1, bool)  # whether a row and the one before it have the same label
    beside[1:-1] = same
    kept = beside[:-1] | beside[1:]
    return rows[kept], np.cumsum(~beside[:-1][kept]) - 1
