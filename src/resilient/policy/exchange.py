"""Whether ranks that want the same bytes read a part each and pass it on, by what both were measured to take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LEAST_NBYTES: Final = 64 << 20
"""For less, finding out takes longer than it could save."""

_MARGIN: Final = 0.8  # what was measured once is only about right


def exchange_pays(read_s: Sequence[float], pass_on_s: Sequence[float]) -> bool:
    """Say whether the ranks should go on reading a part each, and passing it on to the others.

    Alone, each rank reads the parts of all, while all the others do so too; together, each reads its own, and then all
    parts are passed on. All ranks give the same answer to the same numbers.

    Args:
        read_s: how long each rank took to read one part while all were reading one.
        pass_on_s: how long it took each rank until all of these parts were passed on.
    """
    alone_s = max(read_s) * len(read_s)
    together_s = max(read_s) + max(pass_on_s)
    return together_s < _MARGIN * alone_s
