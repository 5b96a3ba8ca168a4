"""How a document is sealed, so that a torn, flipped or foreign one is never taken for one of ours.

Two seals: binary (receipts and manifests: ``magic, kind, format, digest, payload``) and JSON (claims, bases, COMMIT,
run.json: an object whose ``digest`` member covers the bytes of the others).
"""

from __future__ import annotations

import json
import struct
from typing import Any, Final

from resilient.errors import CorruptError, ErrorKind
from resilient.format.digest import NBYTES, digest
from resilient.format.version import FORMAT, check_format

_MAGIC: Final = b"RSLT"
_NAMES: Final = {b"RCPT": "receipt", b"RCPC": "receipt", b"MNFT": "manifest", b"MNFX": "manifest"}
_HEADER: Final = struct.Struct(f"<4s4sI{NBYTES}s")


def seal(kind: bytes, payload: bytes) -> bytes:
    """Return ``payload`` framed under a kind of four bytes."""
    prefix = _MAGIC + kind + struct.pack("<I", FORMAT)
    return prefix + digest(prefix + payload) + payload


def kind_of(data: bytes) -> bytes:
    """Return which kind a frame claims to be; nothing is verified."""
    return data[len(_MAGIC) : len(_MAGIC) + 4]


def unseal(kind: bytes, data: bytes, where: str) -> bytes:
    """Return the payload of a frame.

    Raises:
        CorruptError: it is torn, changed, of another kind, or of a newer format; ``where`` is named.
    """
    if len(data) < _HEADER.size:
        raise CorruptError(f"{where} is torn: {len(data)} bytes", kind=ErrorKind.MALFORMED)
    magic, found_kind, version, expected = _HEADER.unpack_from(data)
    if magic != _MAGIC or found_kind != kind:
        raise CorruptError(f"{where} is not a {_NAMES[kind]} of resilient", kind=ErrorKind.MALFORMED)
    payload = data[_HEADER.size :]
    if digest(data[: _HEADER.size - NBYTES] + payload) != expected:
        raise CorruptError(f"{where} is not what was written: its digest differs", kind=ErrorKind.BAD_DIGEST)
    check_format(version, where)
    return payload


def seal_json(members: dict[str, Any]) -> bytes:
    """Return a JSON document with ``format`` and ``digest`` members added; readable by people, sorted, one line."""
    body = {"format": FORMAT, **members}
    return json.dumps(body | {"digest": digest(_canonical(body)).hex()}, sort_keys=True).encode() + b"\n"


def unseal_json(data: bytes, where: str) -> dict[str, Any]:
    """Return the members of a sealed JSON document.

    Raises:
        CorruptError: it is torn, changed, foreign, or of a newer format; ``where`` is named.
    """
    try:
        body: dict[str, Any] = json.loads(data)
        claimed = body.pop("digest")
        genuine = digest(_canonical(body)).hex() == claimed and seal_json_bytes_match(data, body, claimed)
        version = int(body["format"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptError(
            f"{where} is torn or not a document of resilient ({error!r})", kind=ErrorKind.MALFORMED
        ) from error
    if not genuine:
        raise CorruptError(f"{where} is not what was written: its digest differs", kind=ErrorKind.BAD_DIGEST)
    check_format(version, where)
    return body


def seal_json_bytes_match(data: bytes, body: dict[str, Any], claimed: str) -> bool:
    """Say whether ``data`` is byte for byte what `seal_json` writes: white space and member order are covered too."""
    return json.dumps(body | {"digest": claimed}, sort_keys=True).encode() + b"\n" == data


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
