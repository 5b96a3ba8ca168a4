"""Receipts and manifests as the first writers of format 1 stored them: read for ever, never written again.

One compressed MessagePack array each, with a row per chunk.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from resilient.format.chunks import Chunk, Chunks
from resilient.format.columns import decompress
from resilient.format.documents import Manifest, Receipt

RECEIPT_KIND: Final = b"RCPT"
MANIFEST_KIND: Final = b"MNFT"


def _table(_: type, rows: Any) -> Chunks:
    return Chunks.of(msgspec.convert(rows, list[Chunk]))


_receipts: Final = msgspec.msgpack.Decoder(Receipt, dec_hook=_table)
_manifests: Final = msgspec.msgpack.Decoder(Manifest, dec_hook=_table)


def receipt_of(payload: bytes) -> Receipt:
    """Return the receipt in the payload of a frame of kind `RECEIPT_KIND`."""
    return _receipts.decode(decompress(payload))


def manifest_of(payload: bytes) -> Manifest:
    """Return the manifest in the payload of a frame of kind `MANIFEST_KIND`."""
    return _manifests.decode(decompress(payload))
