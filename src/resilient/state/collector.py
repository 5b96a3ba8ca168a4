"""Python's garbage collector, where it would only be in the way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Keep the collector from going through all objects again and again: with 100,000 tensors, half of the time.

    For work of which all that is made stays, so that there is nothing to be found.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
