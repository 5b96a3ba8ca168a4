"""Waiting without doing anything until the agent of this node restarts its workers."""

from __future__ import annotations

import os
from typing import Literal

from resilient.clock import Clock, Deadline
from resilient.elastic.node import Node, Parked

RESIZE_S = 600.0
PEER_FAILED_S = 60.0
_SLICE_S = 0.5


def park(
    node: Node,
    kind: Literal["resize", "peer-failed"],
    *,
    local_rank: int,
    step: int | None,
    timeout_s: float,
    clock: Clock,
) -> None:
    """Tell the agent that this worker waits, and wait, until a signal ends the process, or the time is up.

    Signals must do what they did before the run: the agent's SIGTERM ends the process at once.
    """
    try:
        node.park(Parked(kind=kind, local_rank=local_rank, pid=os.getpid(), step=step))
    except OSError:
        return  # the agent has taken its directory away: nobody would restart this worker
    deadline = Deadline(clock, timeout_s)
    while not deadline.expired and node.directory.is_dir():
        clock.sleep(min(_SLICE_S, deadline.remaining_s))
