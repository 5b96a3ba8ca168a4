"""How a receipt is stored, so that a committer can merge tens of thousands of them.

Three blocks of it do not depend on what the tensors hold: the structure, which is byte for byte the same on all ranks
that have the same names, the shared values, and the boxes. A committer decodes each distinct structure once, a writer
encodes structure and boxes once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from resilient.format import first_encoding
from resilient.format.chunks import Chunks
from resilient.format.columns import (
    UNDECODABLE,
    Table,
    compress,
    decompress,
    malformed,
    pack_table,
    unpack_table,
    unpack_tables,
)
from resilient.format.documents import Item, Key, Object, Receipt, Tensor, Value
from resilient.format.frame import kind_of, seal, unseal
from resilient.format.layout import Attempt

RECEIPT_KIND: Final = b"RCPC"
OWN: Final = -1
"""In a structure, in place of a rank: that of the receipt. It keeps structures of different ranks equal."""


class Slot(msgspec.Struct, array_like=True, frozen=True):
    """A value without its data."""

    item: str
    name: str
    path: tuple[Key, ...]
    rank: int | None = None


class Structure(msgspec.Struct, array_like=True, frozen=True):
    """What a receipt describes, beside the bytes."""

    items: tuple[Item, ...]
    tensors: tuple[Tensor, ...]
    values: tuple[Slot, ...]


class PackedReceipt(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A receipt as it is stored: ``structure`` and ``shared`` are blocks, see `pack_structure` and `pack_values`.

    ``own`` is the data of the values that are this rank's own.
    """

    step: int
    generation: int
    nonce: str
    rank: int
    world_size: int
    structure: bytes
    shared: bytes
    own: tuple[bytes, ...]
    objects: tuple[Object, ...]
    chunks: Table

    @property
    def attempt(self) -> Attempt:
        return Attempt(step=self.step, generation=self.generation, nonce=self.nonce)


_encoder: Final = msgspec.msgpack.Encoder()
_receipts: Final = msgspec.msgpack.Decoder(PackedReceipt)
_structures: Final = msgspec.msgpack.Decoder(Structure)
_data: Final = msgspec.msgpack.Decoder(tuple[bytes, ...])


def pack_structure(rank: int, items: Sequence[Item], tensors: Sequence[Tensor], values: Sequence[Value]) -> bytes:
    """Return the block of what a rank describes."""

    def owned(found: int | None) -> int | None:
        return OWN if found == rank else found

    return compress(
        _encoder.encode(
            Structure(
                items=tuple(items),
                tensors=tuple(
                    each if each.rank is None else msgspec.structs.replace(each, rank=owned(each.rank))
                    for each in tensors
                ),
                values=tuple(Slot(each.item, each.name, each.path, owned(each.rank)) for each in values),
            )
        )
    )


def pack_values(values: Sequence[Value]) -> tuple[bytes, tuple[bytes, ...]]:
    """Return the block of the values that ranks share, and the data of those that are one rank's own."""
    shared = compress(_encoder.encode([each.data for each in values if each.rank is None]))
    return shared, tuple(each.data for each in values if each.rank is not None)


def pack_receipt(receipt: Receipt) -> PackedReceipt:
    """Return a receipt as it is stored."""
    shared, own = pack_values(receipt.values)
    return PackedReceipt(
        step=receipt.step,
        generation=receipt.generation,
        nonce=receipt.nonce,
        rank=receipt.rank,
        world_size=receipt.world_size,
        structure=pack_structure(receipt.rank, receipt.items, receipt.tensors, receipt.values),
        shared=shared,
        own=own,
        objects=receipt.objects,
        chunks=pack_table(receipt.chunks),
    )


def seal_receipt(packed: PackedReceipt) -> bytes:
    """Return the bytes of a receipt."""
    return seal(RECEIPT_KIND, _encoder.encode(packed))


def unseal_receipt(data: bytes, where: str) -> PackedReceipt:
    """Return a receipt as it is stored, whichever way; its tables are not looked at yet.

    Raises:
        CorruptError: it is torn, changed, foreign, or of a newer format; ``where`` is named.
    """
    try:
        if kind_of(data) == first_encoding.RECEIPT_KIND:
            payload = unseal(first_encoding.RECEIPT_KIND, data, where)
            return pack_receipt(first_encoding.receipt_of(payload))
        return _receipts.decode(unseal(RECEIPT_KIND, data, where))
    except UNDECODABLE as error:
        raise malformed(where, error) from error


def encode_receipt(receipt: Receipt) -> bytes:
    """Return the bytes of a receipt."""
    return seal_receipt(pack_receipt(receipt))


def decode_receipt(data: bytes, where: str) -> Receipt:
    """Return a receipt.

    Raises:
        CorruptError: it is torn, changed, foreign, or of a newer format; ``where`` is named.
    """
    packed = unseal_receipt(data, where)
    structure = unpack_structure(packed, where)
    rank = packed.rank
    return Receipt(
        step=packed.step,
        generation=packed.generation,
        nonce=packed.nonce,
        rank=rank,
        world_size=packed.world_size,
        items=structure.items,
        tensors=tuple(
            msgspec.structs.replace(each, rank=rank) if each.rank == OWN else each for each in structure.tensors
        ),
        objects=packed.objects,
        chunks=unpack_chunks(packed, where),
        values=unpack_values(packed, structure, where),
    )


def unpack_structure(packed: PackedReceipt, where: str) -> Structure:
    """Return what a receipt describes; ranks that are its own are `OWN`."""
    try:
        return _structures.decode(decompress(packed.structure))
    except UNDECODABLE as error:
        raise malformed(where, error) from error


def unpack_values(
    packed: PackedReceipt, structure: Structure, where: str, *, only_own: bool = False
) -> tuple[Value, ...]:
    """Return the values of a receipt, with the ranks that they belong to; or only those that ranks do not share."""
    try:
        shared = iter(() if only_own else _data.decode(decompress(packed.shared)))
        own = iter(packed.own)
        return tuple(
            Value(
                item=slot.item,
                name=slot.name,
                path=slot.path,
                data=next(shared if slot.rank is None else own),
                rank=packed.rank if slot.rank == OWN else slot.rank,
            )
            for slot in structure.values
            if slot.rank is not None or not only_own
        )
    except (*UNDECODABLE, RuntimeError) as error:
        raise malformed(where, error) from error  # RuntimeError: there is less data than there are slots


def unpack_chunks_of(receipts: Sequence[tuple[PackedReceipt, str]]) -> tuple[Chunks, list[int]]:
    """Return the tables of receipts (one at least), joined, and how many rows each has.

    Raises:
        CorruptError: one does not decode; what stands beside it is named.
    """
    tables = [packed.chunks for packed, _ in receipts]
    try:
        return unpack_tables(tables), [each.rows for each in tables]
    except UNDECODABLE:
        for packed, where in receipts:
            unpack_chunks(packed, where)  # of one, this says which it is
        raise


def unpack_chunks(packed: PackedReceipt, where: str) -> Chunks:
    """Return the table of a receipt."""
    try:
        return unpack_table(packed.chunks)
    except UNDECODABLE as error:
        raise malformed(where, error) from error
