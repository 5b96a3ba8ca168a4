"""The checks of several nodes together: starts the process that takes part in the pair tests, and waits for it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

import msgspec

from resilient.check.limits import Limits
from resilient.check.result import Result, Status, failed
from resilient.check.suite import Begun, Ended, Worker
from resilient.clock import SYSTEM_CLOCK, Clock, Deadline

NAME: Final = "pairs"
MODULE: Final = "resilient.check.pair_node"

_TIMEOUT_S: Final = 200.0  # with what a node has for itself, this is below the 10 min of a full check
_COME_S: Final = 120.0


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What the process of a node is told. ``local``: what its node has found alone.

    ``come_s``: how long nodes wait for each other to come. ``turn_s``: how long one test takes; ``timeout_s``: how
    long it waits for the partner.
    """

    node: int
    nodes: int
    host: str
    address: str
    port: int
    prefix: str
    local: list[Result] = []
    limits: Limits = Limits()
    nbytes: int = 16 << 20
    come_s: float = _COME_S
    turn_s: float = 1.0
    timeout_s: float = 20.0


def run_pairs(
    local: Sequence[Result],
    *,
    node: int,
    nodes: int,
    master: str | None,
    job: str | None,
    limits: Limits | None = None,
    timeout_s: float = _TIMEOUT_S,
    clock: Clock = SYSTEM_CLOCK,
) -> tuple[list[Result], Status]:
    """Test this node with others; return results, and the worst of all nodes.

    The results are those of all nodes on node 0, and those of this node elsewhere. All nodes have to call this. What
    fails is among the results.

    Args:
        local: what this node has found alone, to be told to node 0.
        node: which one this is, of ``nodes``.
        nodes: how many there are.
        master: address and port of torchrun's key-value store, or where node 0 may open one.
        job: tells the words of different jobs in one store apart.
        limits: instead of the usual ones.
        timeout_s: after this the process is ended.
        clock: for that.
    """
    host = socket.gethostname()
    address, _, port = (master or "").rpartition(":")
    if not address:
        return _lost("torchrun has not said where the nodes meet (MASTER_ADDR, MASTER_PORT)", host, local)
    part = Part(
        node=node,
        nodes=nodes,
        host=host,
        address=address,
        port=int(port),
        prefix=f"resilient-check/{quote(job or '', safe='')}",
        local=list(local),
        limits=limits or Limits(),
    )
    with Worker(MODULE) as worker:
        worker.tell(part)
        deadline = Deadline(clock, timeout_s)
        message = worker.hear(deadline.remaining_s)
        if isinstance(message, Begun):
            message = worker.hear(deadline.remaining_s)
        if isinstance(message, Ended):
            return message.results, message.end
        if message is None:
            how, last = worker.end()
            return _lost(f"the process for the pairs ended with {how}: {last}", host, local)
    return _lost(f"the tests in pairs did not end in {timeout_s:.0f} s", host, local)


def _lost(line: str, host: str, local: Sequence[Result]) -> tuple[list[Result], Status]:
    remedy = "look whether all nodes run the check, and reach the address of node 0"
    return [*local, msgspec.structs.replace(failed(NAME, line, remedy), node=host)], Status.FAILED
