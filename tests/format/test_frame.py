"""A sealed document that is torn, changed, foreign or newer is never taken for a good one."""

from __future__ import annotations

import json

import pytest

from resilient.errors import CorruptError, ErrorKind
from resilient.format import frame
from resilient.format.chunks import Chunks
from resilient.format.documents import (
    Claim,
    Commit,
    Item,
    Receipt,
    Tensor,
    Value,
    decode_document,
    encode_document,
)
from resilient.format.receipts import decode_receipt, encode_receipt

COMMIT = Commit(
    step=12,
    generation=3,
    nonce="0123456789abcdef",
    manifest="ab" * 16,
    manifest_nbytes=10,
    nbytes=100,
    world_size=2,
    items=("model", "optimizer"),
    created="2026-11-30T00:00:00.000Z",
    reason="policy",
    committer=0,
)
RECEIPT = Receipt(
    step=12,
    generation=3,
    nonce="0123456789abcdef",
    rank=1,
    world_size=2,
    items=(Item("model", "module"),),
    tensors=(Tensor("model", "w.1", ("w", 1, -1, (b"\x01",)), "float32", (2, 3)),),
    objects=(),
    chunks=Chunks.of(()),
    values=(Value("model", "v", ("v",), b"\x01", 1),),
)


def test_documents_come_back() -> None:
    assert decode_document(Commit, encode_document(COMMIT), "x") == COMMIT
    assert decode_receipt(encode_receipt(RECEIPT), "x") == RECEIPT


@pytest.mark.parametrize("sealed", ["json", "binary"])
def test_every_flipped_bit_and_every_truncation_is_noticed(sealed: str) -> None:
    data = encode_document(COMMIT) if sealed == "json" else encode_receipt(RECEIPT)

    def read(changed: bytes) -> object:
        return decode_document(Commit, changed, "it") if sealed == "json" else decode_receipt(changed, "it")

    for at in range(len(data)):
        for bit in (1, 0x20, 0x80):
            with pytest.raises(CorruptError, match="it"):
                read(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
        with pytest.raises(CorruptError, match="it"):
            read(data[:at])
    with pytest.raises(CorruptError):
        read(data + b"\n")


def test_a_document_of_another_kind_is_refused() -> None:
    with pytest.raises(CorruptError, match="not a claim"):
        decode_document(Claim, encode_document(COMMIT), "it")
    with pytest.raises(CorruptError, match="not a receipt"):
        decode_receipt(frame.seal(b"MNFT", b""), "it")


def test_a_newer_format_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "FORMAT", 2)
    newer, newer_json = frame.seal(b"RCPT", b""), frame.seal_json({"a": 1})
    monkeypatch.undo()
    for read in (lambda: frame.unseal(b"RCPT", newer, "it"), lambda: frame.unseal_json(newer_json, "it")):
        with pytest.raises(CorruptError, match="format 2") as caught:
            read()
        assert caught.value.kind == ErrorKind.NEWER_FORMAT
        assert caught.value.hint


def test_a_sealed_document_is_readable() -> None:
    members = json.loads(encode_document(COMMIT))
    assert members["kind"] == "commit"
    assert members["items"] == ["model", "optimizer"]
