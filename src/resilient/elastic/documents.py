"""What agents write into the store about themselves and each other: small sealed documents, mostly created once."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from resilient.errors import CorruptError
from resilient.format.frame import seal_json, unseal_json

D = TypeVar("D", bound=msgspec.Struct)


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """What has to be the same on all nodes. ``command`` is empty where it could not be found out."""

    command: str  # digest of the script's content and its arguments
    command_text: str  # the same for people
    torch: str
    resilient: str

    def difference(self, other: Agreement) -> str | None:
        """Say in words what ``other`` has that differs; None if they can work together."""
        if self.command and other.command and self.command != other.command:
            if self.command_text == other.command_text:
                return f"another content of the script of {self.command_text!r}"
            return f"the command {other.command_text!r} instead of {self.command_text!r}"
        if self.torch != other.torch:
            return f"torch {other.torch} instead of {self.torch}"
        if self.resilient != other.resilient:
            return f"resilient {other.resilient} instead of {self.resilient}"
        return None


class Agent(msgspec.Struct, frozen=True, kw_only=True):
    """Who an agent is and where it is found; ``join/<nonce>`` and ``wait/<nonce>``.

    ``addresses``: its names and numbers, to be tried in this order. ``port``: of its listener. ``store_port``: of the
    key-value server that it has started for this round; 0 while it only waits.
    """

    nonce: str
    host: str
    pid: int
    addresses: tuple[str, ...]
    port: int
    store_port: int
    agreement: Agreement
    created: str

    @property
    def title(self) -> str:
        """How the agent is named to people."""
        return f"{self.host} (agent {self.pid})"


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    """The decision about one round: ``closed``. Whoever creates it decides.

    ``members`` are in the order of their ranks. ``master`` is the nonce of the member whose key-value server is used,
    at ``address`` and ``port``. ``job`` names this start of the job, in all its rounds. ``target``: how many nodes the
    job was last asked to have, by the request of number ``request``; 0 if it was not.
    """

    round: int
    job: str
    members: tuple[Agent, ...]
    master: str
    address: str
    port: int
    target: int
    request: int
    by: str
    created: str

    @property
    def nonces(self) -> tuple[str, ...]:
        return tuple(member.nonce for member in self.members)


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """Whom an agent reaches over the network: ``reach/<nonce>``, written again and again while it lives.

    ``reached``: for each one, which of its addresses worked. ``unreached``: why not. ``count`` moves with each writing.
    """

    nonce: str
    count: int
    reached: dict[str, int]
    unreached: dict[str, str]


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """A member takes part no more: ``lost/<nonce>``, by another one, or by itself when it leaves.

    ``certain``: it is known to be dead; otherwise it has fallen silent, and may live where it cannot be seen.
    """

    nonce: str
    by: str
    why: str
    certain: bool
    created: str


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of a member have all ended well: ``done/<nonce>``."""

    nonce: str
    created: str


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The job is over: ``ended``."""

    by: str
    created: str


def encode(document: msgspec.Struct) -> bytes:
    """Return a document as bytes that are recognized when they are read back."""
    members: dict[str, Any] = msgspec.to_builtins(document)
    return seal_json(members)


def decode(kind: type[D], data: bytes, where: str) -> D | None:
    """Return a document, or None if it does not parse: what is torn counts as absent, and blocks nobody."""
    try:
        members = unseal_json(data, where)
        members.pop("format")
        return msgspec.convert(members, kind)
    except (CorruptError, msgspec.ValidationError):
        return None
