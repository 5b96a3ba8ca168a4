"""Nodes with addresses of their own on one machine, between which the network can be cut: Linux network namespaces.

Each node is joined to a router, and to nothing else. They share files, so a place on the disk is a store that every
node reaches, whatever is cut.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType
from typing import Self

_numbers = itertools.count()


class Network:
    """Some nodes, numbered from 0, all of which reach each other at first; a context manager. Needs root."""

    def __init__(self, nodes: int) -> None:
        tag = f"r{os.getpid() % 100_000}x{next(_numbers)}"
        self._router = f"{tag}-router"
        self.names = [f"{tag}-{node}" for node in range(nodes)]
        self.addresses = [f"10.77.{node}.2" for node in range(nodes)]

    @staticmethod
    def why_not() -> str | None:
        """Say why there can be no namespaces here; None if there can."""
        if os.geteuid() != 0 or shutil.which("ip") is None:
            return "network namespaces need root, and the command ip"
        probe = f"r{os.getpid() % 100_000}-probe"
        made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
        if made.returncode:
            return f"no network namespaces here: {made.stderr.strip()}"
        _ip("netns", "del", probe)
        return None

    def __enter__(self) -> Self:
        _ip("netns", "add", self._router)
        _ip("-n", self._router, "link", "set", "lo", "up")
        self.run_in(self._router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for node, name in enumerate(self.names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"n{node}", "netns", self._router)
            _ip("-n", self._router, "address", "add", f"10.77.{node}.1/24", "dev", f"n{node}")
            _ip("-n", self._router, "link", "set", f"n{node}", "up")
            _ip("-n", name, "address", "add", f"{self.addresses[node]}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "route", "add", "default", "via", f"10.77.{node}.1")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in [*self.names, self._router]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def on(self, node: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs a command on a node."""
        return ["ip", "netns", "exec", self.names[node], *command]

    def cut(self, node: int, *others: int) -> None:
        """Drop every packet between a node and others, in both directions, without a word to either."""
        for other in others:
            self._rule("add", node, other)
            self._rule("add", other, node)

    def heal(self, node: int, *others: int) -> None:
        """Let packets through again."""
        for other in others:
            self._rule("del", node, other)
            self._rule("del", other, node)

    def throttle(self, node: int, rate: str) -> None:
        """Let what a node sends pass at no more than a rate, as tc writes it: "1mbit"."""
        shape = ["tbf", "rate", rate, "burst", "16kb", "latency", "400ms"]
        self.run_in(self.names[node], "tc", "qdisc", "add", "dev", "eth0", "root", *shape)

    def _rule(self, verb: str, source: int, destination: int) -> None:
        # At the router: a route of the node's own would tell it at once.
        between = ["from", self.addresses[source], "to", self.addresses[destination]]
        _ip("-n", self._router, "rule", verb, *between, "blackhole")

    @staticmethod
    def run_in(name: str, *command: str) -> str:
        done = subprocess.run(
            ["ip", "netns", "exec", name, *command], capture_output=True, text=True, check=True, timeout=30
        )
        return done.stdout


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr.strip()}"
