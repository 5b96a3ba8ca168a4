"""The digest that covers every stored byte: xxh3-128.

It finds accidents (flipped bits, torn and lost writes, stale blocks), at memory speed and without the GIL. It is no
defense against somebody who may write to the store: see SECURITY.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import xxhash

BytesLike: TypeAlias = bytes | bytearray | memoryview

NBYTES = 16


def digest(data: BytesLike) -> bytes:
    """Return the 16-byte digest of a buffer."""
    return xxhash.xxh3_128_digest(data)


def digest_of_parts(parts: Iterable[BytesLike]) -> bytes:
    """Return the digest of buffers that lie back to back, without joining them."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()
