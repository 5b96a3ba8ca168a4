"""What is known of a rank of a job that hangs, as it is kept for whoever explains it."""

from __future__ import annotations

import msgspec

from resilient.errors import CorruptError, ErrorKind
from resilient.format.frame import seal_json, unseal_json


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A process that a rank has started, such as a worker of a ``DataLoader``; ``state`` as the kernel names it."""

    pid: int
    command: str
    state: str
    waits_in: str = ""
    stacks: str = ""


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank stood when a rank of its node had hung for too long; ``control/hangs/<generation>-<rank>``.

    ``found_by``: the rank that had. ``timeout_s``: after how long this rank's own section would have been a hang.
    ``waits``: 0 if its stack waits for no other rank, 1 if it may, 2 if it does. ``silent_s``: since the interpreter
    has given a sign. ``stacks``: Python's, of all threads; empty if none could be had.
    """

    generation: int
    nonce: str
    rank: int
    world_size: int
    host: str
    pid: int
    found_by: int
    step: int
    section: str
    age_s: float
    timeout_s: float
    silent_s: float
    state: str
    waits: int
    signature: str
    created: str
    waits_in: str = ""
    kernel_stack: str = ""
    stacks: str = ""
    workers: tuple[Worker, ...] = ()


def encode_hang(hang: Hang) -> bytes:
    """Return it as sealed JSON."""
    return seal_json(msgspec.to_builtins(hang))


def decode_hang(data: bytes, where: str) -> Hang:
    """Return what was given to `encode_hang`, or raise `CorruptError` naming ``where``."""
    members = unseal_json(data, where)
    members.pop("format")
    try:
        return msgspec.convert(members, Hang)
    except msgspec.ValidationError as error:
        raise CorruptError(f"{where} does not decode: {error}", kind=ErrorKind.MALFORMED) from error
