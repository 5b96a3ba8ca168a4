"""How the ranks of one life of a job find each other in a key-value store that may hold what earlier lives left there.

torchelastic restarts the workers and lets them use the same store again, without a prefix of their own (torch
2.13): a rank that is quick reads what the dead ones said. So every rank says hello with a number of its own, rank 0
answers with all the numbers that it sees and a nonce, again and again while they change, and a rank believes only
an answer that has its own number.
"""

from __future__ import annotations

import secrets
from typing import Final, Protocol

import msgspec

from resilient.clock import SYSTEM_CLOCK, Clock, Deadline
from resilient.errors import ErrorKind, PeerError

_POLL_S: Final = 0.01
_WELCOME: Final = "resilient/welcome"


class KeyValues(Protocol):
    """What is needed of a key-value store; ``torch.distributed.Store`` has it. Setting a key again replaces it."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class _Welcome(msgspec.Struct, array_like=True):
    nonce: str
    hellos: dict[int, bytes]


def meet(values: KeyValues, rank: int, world_size: int, *, timeout_s: float, clock: Clock = SYSTEM_CLOCK) -> str:
    """Return a nonce that exactly the ranks of this life share; every rank calls this.

    Raises:
        PeerError: not everybody came in time; who is missing is named.
    """
    mine = secrets.token_hex(8)
    values.set(_hello(rank), mine.encode())
    deadline = Deadline(clock, timeout_s)
    if rank == 0:
        _receive(values, world_size, mine, deadline, clock)
        return mine
    while True:
        if values.check([_WELCOME]):
            welcome = msgspec.msgpack.decode(values.get(_WELCOME), type=_Welcome)
            if welcome.hellos.get(rank) == mine.encode():
                values.set(_arrived(welcome.nonce, rank), b"")
                return welcome.nonce
        if deadline.expired:
            raise _missing([0], timeout_s)
        clock.sleep(_POLL_S)


def _receive(values: KeyValues, world_size: int, nonce: str, deadline: Deadline, clock: Clock) -> None:
    """Answer hellos until every rank has found its own in the answer."""
    answered: dict[int, bytes] = {}
    missing = list(range(1, world_size))
    while missing:
        hellos = {rank: values.get(_hello(rank)) for rank in range(1, world_size) if values.check([_hello(rank)])}
        if hellos != answered:
            values.set(_WELCOME, msgspec.msgpack.encode(_Welcome(nonce, hellos)))
            answered = hellos
        missing = [rank for rank in missing if not values.check([_arrived(nonce, rank)])]
        if missing and deadline.expired:
            raise _missing(missing, deadline.timeout_s)
        if missing:
            clock.sleep(_POLL_S)


def _hello(rank: int) -> str:
    return f"resilient/hello/{rank}"


def _arrived(nonce: str, rank: int) -> str:
    return f"resilient/arrived/{nonce}/{rank}"


def _missing(ranks: list[int], timeout_s: float) -> PeerError:
    return PeerError(
        f"rank {', '.join(map(str, ranks))} did not come within {timeout_s:g} s of the start",
        kind=ErrorKind.PEER_TIMEOUT,
        hint="every rank must get here; look at the log of the rank that is named",
    )
