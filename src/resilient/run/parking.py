"""Waiting without doing anything until the agent of this node restarts its workers."""

from __future__ import annotations

import os
from typing import Literal

from resilient.clock import Clock, Deadline
from resilient.elastic.node import Node, Parked

RESIZE_S = 600.0
PEER_FAILED_S = 60.0
_AWAY_S = 600.0
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

    While the agent cannot do anything, as its store is away, the time does not run, for ten minutes at most.

    Signals must do what they did before the run: the agent's SIGTERM ends the process at once.
    """
    try:
        node.park(Parked(kind=kind, local_rank=local_rank, pid=os.getpid(), step=step))
    except OSError:
        return  # the agent has taken its directory away: nobody would restart this worker
    deadline, last = Deadline(clock, timeout_s), Deadline(clock, max(timeout_s, _AWAY_S))
    while not deadline.expired and node.directory.is_dir():
        if node.store_away() and not last.expired:
            deadline = Deadline(clock, timeout_s)
        clock.sleep(min(_SLICE_S, deadline.remaining_s))
