"""Whether names resolve and connections can be made: what every rendezvous begins with."""

from __future__ import annotations

import socket
from typing import Final
from urllib.parse import urlsplit

from resilient.check.context import Context, read_text
from resilient.check.limits import Limits
from resilient.check.result import Result, Status, failed, passed, skipped
from resilient.clock import SYSTEM_CLOCK, Clock

DNS: Final = "names (DNS)"
PORTS: Final = "ports"

_CONNECT_S: Final = 5.0


def check(context: Context) -> list[Result]:
    """Resolve this node's own name and the hosts of the places, and connect to a port of its own."""
    own = socket.gethostname()
    hosts = [own, *(host for place in context.places if (host := host_of(place)))]
    return [
        *(judge_resolved(host, *resolve(host), context.limits) for host in dict.fromkeys(hosts)),
        ports(own, context),
    ]


def host_of(place: str) -> str | None:
    """Return the host in an ``http`` URL; other URLs name buckets, whose hosts their clients know."""
    parts = urlsplit(place)
    return parts.hostname if parts.scheme in {"http", "https"} else None


def resolve(host: str, clock: Clock = SYSTEM_CLOCK) -> tuple[str | None, float]:
    """Return an address of ``host`` (None: it has none) and how long that took, in seconds."""
    start = clock.monotonic()
    try:
        address = str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return None, clock.monotonic() - start
    return address, clock.monotonic() - start


def judge_resolved(host: str, address: str | None, duration_s: float, limits: Limits) -> Result:
    if address is None:
        remedy = "check /etc/resolv.conf and /etc/hosts; torchrun --local-addr names this node by a number instead"
        return failed(DNS, f"{host} has no address", remedy, subject=host)
    slow = duration_s > limits.resolve_s
    return Result(
        name=DNS,
        status=Status.SLOW if slow else Status.OK,
        line=_where(address) if not slow else f"took {duration_s:.1f} s to resolve",
        remedy="a name server in /etc/resolv.conf does not answer: remove it, or put the nodes into /etc/hosts"
        if slow
        else "",
        subject=host,
        figure=duration_s,
        unit="s",
        limit=limits.resolve_s,
    )


def _where(address: str) -> str:
    if address.startswith("127."):
        return f"is {address}: enough on one node; between nodes give torchrun --local-addr"
    return f"is {address}"


def ports(host: str, context: Context) -> Result:
    """Listen on a port of this node's own address and connect to it; look how many ports there are for connections."""
    text = read_text(context.path("proc/sys/net/ipv4/ip_local_port_range"))
    available = _span(text)
    if available is not None and available < context.limits.ephemeral_ports:
        return Result(
            name=PORTS,
            status=Status.FAILED,
            line=f"only {available} ports are there for connections: many ranks use them up",
            remedy="sysctl -w net.ipv4.ip_local_port_range='32768 60999'",
            figure=available,
            unit="ports",
            limit=context.limits.ephemeral_ports,
        )
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return skipped(PORTS, "this node's own name has no address", subject=host)
    return judge_connection(address, connect_to_itself(address))


def connect_to_itself(address: str) -> str | None:
    """Return why this node cannot connect to a port of its own at ``address``; None if it can."""
    try:
        with socket.create_server((address, 0)) as server:
            server.settimeout(_CONNECT_S)
            with socket.create_connection(server.getsockname()[:2], timeout=_CONNECT_S):
                server.accept()[0].close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def judge_connection(address: str, why: str | None) -> Result:
    if why is None:
        return passed(PORTS, "can be listened on and connected to", subject=address)
    remedy = "check /etc/hosts (does this node's name stand for another's address?) and the firewall"
    return failed(PORTS, f"no connection to a port of its own address {address}: {why}", remedy, subject=address)


def _span(text: str | None) -> int | None:
    words = (text or "").split()
    return int(words[1]) - int(words[0]) + 1 if len(words) == 2 else None
