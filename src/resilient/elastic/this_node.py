"""What an agent says about its node: where it is found, and what it runs."""

from __future__ import annotations

import fcntl
import platform
import shlex
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from resilient.elastic.documents import Agreement
from resilient.format.digest import digest

_SIOCGIFADDR = 0x8915  # of Linux
_DOCUMENTATION_HOST = "192.0.2.1"  # RFC 5737: no packet is sent, only the route is looked up


def addresses(local_addr: str | None) -> tuple[str, ...]:
    """Return how this node may be reached, to be tried in this order: a name is what certificates and logs know.

    ``local_addr``: what torchrun's ``--local-addr`` says; that alone, then.
    """
    if local_addr:
        return (local_addr,)
    name = socket.gethostname()
    found = [name]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((_DOCUMENTATION_HOST, 9))
        found.append(probe.getsockname()[0])
    with suppress(OSError):
        found.append(socket.gethostbyname(name))
    found += _of_interfaces()
    # The loopback's own reaches another agent only in a job of this machine alone.
    elsewhere = [address for address in dict.fromkeys(found) if not address.startswith("127.")]
    return (*elsewhere, "127.0.0.1") if len(elsewhere) == 1 else tuple(elsewhere)


def _of_interfaces() -> list[str]:
    """Return the IPv4 addresses of this machine: where no route leads out, they are all that there is."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return found


def agreement(torch_version: str, *, with_command: bool, parse: Callable[[Sequence[str]], Sequence[str]]) -> Agreement:
    """Return what has to be the same on all nodes.

    ``parse`` returns the script and its arguments, of the arguments of torchrun; it may raise SystemExit.
    """
    command: Sequence[str] = ()
    with suppress(SystemExit):
        command = parse(sys.argv[1:]) if with_command else ()
    content = b""
    if command:
        with suppress(OSError):
            content = Path(command[0]).read_bytes()
    return Agreement(
        command=digest("\0".join(command[1:]).encode() + b"\0\0" + content).hex() if command else "",
        command_text=shlex.join(command),
        torch=torch_version,
        resilient=version("resilient-torch"),
    )


def host() -> str:
    """Return the name of this machine."""
    return platform.node() or socket.gethostname()
