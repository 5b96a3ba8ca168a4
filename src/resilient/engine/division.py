"""Which rank stores which box: replicated bytes are written once, spread over those who hold them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from resilient.format.box import Box, split
from resilient.format.digest import digest
from resilient.format.dtypes import ITEMSIZE
from resilient.state.leaves import Captured, TensorLeaf


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk-to-be: a box of a tensor that this rank holds.

    ``leaf`` indexes `Captured.tensors`. ``owner`` is the rank that stores it when the holders are known; None if they
    are not, and then every rank that holds it does. ``replicated`` says that other ranks may hold the same box.
    """

    leaf: int
    box: Box
    nbytes: int
    owner: int | None
    replicated: bool


def divide(captured: Captured, *, world_size: int, chunk_nbytes: int, agreed: bool) -> Iterator[Piece]:
    """Yield the pieces of everything that this rank holds, in the order of the leaves.

    ``agreed``: all ranks hold the same plain tensors, so each knows the holders of all of them. Chunk k of a tensor
    goes to the holder (k + a hash of its name) modulo their number: every holder works that out alone, and gets an
    equal share.
    """
    everybody = tuple(range(world_size))
    for index, leaf in enumerate(captured.tensors):
        if leaf.alias is not None:
            continue
        holders = everybody if agreed and is_plain(leaf) else leaf.holders
        alone = holders is not None and len(holders) == 1
        shift = 0 if alone else int.from_bytes(digest(f"{leaf.item}/{leaf.name}".encode())[:4], "little")
        itemsize = ITEMSIZE[leaf.dtype]
        for number, box in enumerate(split(leaf.box, itemsize, chunk_nbytes)):
            yield Piece(
                leaf=index,
                box=box,
                nbytes=box.volume * itemsize,
                owner=None if holders is None else holders[(number + shift) % len(holders)],
                replicated=leaf.rank is None and (holders is None or len(holders) > 1),
            )


def signature(captured: Captured) -> bytes:
    """Return a digest of which plain tensors there are: equal on two ranks if and only if they hold the same ones."""
    plain = sorted(f"{leaf.item}/{leaf.name} {leaf.dtype} {leaf.shape}" for leaf in captured.tensors if is_plain(leaf))
    return digest("\n".join(plain).encode())


def is_plain(leaf: TensorLeaf) -> bool:
    # A box declared by the user (`Shard`) may be on any ranks: each that holds it stores it.
    return leaf.holders is None and leaf.rank is None and leaf.box == Box.whole(leaf.shape)
