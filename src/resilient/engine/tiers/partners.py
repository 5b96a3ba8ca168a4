"""Which node keeps a copy of what this one has, and where its writer takes it."""

from __future__ import annotations

import ipaddress
import socket
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import msgspec

from resilient.engine.peers import Peers
from resilient.errors import PeerError
from resilient.format.documents import Claim
from resilient.writer.messages import Address

_ANY_PORT: Final = 9


class _Place(msgspec.Struct, array_like=True, frozen=True):
    """Where a rank is: its node, and the label of what fails together.

    ``address``: of its host, as far as that is known alone. ``listens``: whether its writer takes copies.
    """

    node: str
    label: str
    address: str
    listens: bool


class Partners:
    """The ranks that take each other's copies, over one generation."""

    def __init__(self, claim: Claim, peers: Peers) -> None:
        self._peers = peers
        self._topic = f"copies/{claim.generation}-{claim.nonce}"
        self.deaf: int | None = None
        """A rank whose writer takes no copies: one that is a thread, or that may not listen."""
        self._host = ""
        self._partner: int | None = None
        self._ears: tuple[int, str] | None = None

    @property
    def copies(self) -> bool:
        """Whether there is another node for this rank's copies."""
        return self._partner is not None

    def meet(self, *, node: str, label: str, master: str | None, timeout_s: float) -> int | None:
        """Find the rank that keeps this one's copies; every rank calls this, when its writer is ready.

        None: there is no other node, or label; or some rank has no writer that takes copies, so no state is ever whole.
        """
        mine = _Place(node, label, _own_address(master), self._ears is not None)
        answers = self._peers.gather(self._peers.numbered("nodes"), msgspec.msgpack.encode(mine), timeout_s)
        places = [msgspec.msgpack.decode(answer, type=_Place) for answer in answers]
        self.deaf = next((rank for rank, each in enumerate(places) if not each.listens), None)
        if self.deaf is None:
            self._partner = partner_of(self._peers.rank, [(each.node, each.label) for each in places])
        self._host = _seen_from_others(mine.address, [each.address for each in places])
        self._publish()
        return self._partner

    def listens(self, port: int, token: str) -> None:
        """Take note of where this rank's writer takes copies; a new writer listens somewhere else."""
        self._ears = (port, token)
        self._publish()

    def address(self) -> Address | None:
        """Return where this rank's copies go now; None if nowhere. Does not wait."""
        if self._partner is None:
            return None
        try:
            found = self._peers.fetch(f"{self._topic}/{self._partner}", 0)
        except PeerError:
            return None  # the job is over
        return None if found is None else msgspec.msgpack.decode(found, type=Address)

    def _publish(self) -> None:
        if self._ears is None or not self._host:
            return
        address = Address(host=self._host, port=self._ears[0], token=self._ears[1])
        try:
            self._peers.publish(f"{self._topic}/{self._peers.rank}", msgspec.msgpack.encode(address))
        except PeerError:
            return  # the job is over


def partner_of(rank: int, places: Sequence[tuple[str, str]]) -> int | None:
    """Return which rank keeps the copies of this one, given all ranks' nodes and labels; None if there is none.

    One of the next node, in the order of ranks, that has another label; so each node of a ring of any number keeps the
    copies of one other, as far as the labels allow.
    """
    nodes: defaultdict[str, list[int]] = defaultdict(list)
    for each, (node, _) in enumerate(places):
        nodes[node].append(each)
    order = list(nodes)
    node, label = places[rank]
    at = order.index(node)
    for other in (*order[at + 1 :], *order[:at]):
        ranks = nodes[other]
        if places[ranks[0]][1] != label:
            return ranks[nodes[node].index(rank) % len(ranks)]
    return None


def _own_address(master: str | None) -> str:
    """Return the address by which this host reaches the first one of the job, and others reach this host."""
    host, _, port = (master or "").rpartition(":")
    if not host:
        return "127.0.0.1"
    return _source_towards(host, int(port)) or socket.gethostname()


def _seen_from_others(own: str, all_: Sequence[str]) -> str:
    """Return the address of this host that others reach, given what each rank found by itself.

    On the first host of the job the name of the first host may mean the loopback device, which on others is another
    machine: then it is the way to one of those that counts.
    """
    if not _is_loopback(own):
        return own
    for other in all_:
        if not _is_loopback(other):
            found = _source_towards(other, _ANY_PORT)
            if found is not None and not _is_loopback(found):
                return found
    return own


def _source_towards(host: str, port: int) -> str | None:
    """Return from which address this host reaches another one; None if it does not."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing: it only chooses the way
                return str(probe.getsockname()[0])
    except OSError:
        pass
    return None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"  # a name, which others look up
