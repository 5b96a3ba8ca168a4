"""A worker whose peers failed waits for its agent: not for ever, and not while the agent's own store is away."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient.elastic.node import Node
from resilient.run.parking import PEER_FAILED_S, park
from tests.catalog.runs import HandClock

AWAY_S = 200.0


@pytest.mark.parametrize(
    ("back_s", "expected_s"), [(0.0, PEER_FAILED_S), (AWAY_S, AWAY_S + PEER_FAILED_S), (1e9, 600.0 + PEER_FAILED_S)]
)
def test_the_time_does_not_run_while_the_store_of_the_agent_is_away(
    tmp_path: Path, back_s: float, expected_s: float
) -> None:
    agent = Node(tmp_path)
    agent.tell_store(answers=False)

    class Healing(HandClock):
        def sleep(self, duration_s: float) -> None:
            super().sleep(duration_s)
            if self.monotonic() - start >= back_s:
                agent.tell_store(answers=True)

    clock = Healing()
    start = clock.monotonic()
    park(Node(tmp_path), "peer-failed", local_rank=0, step=None, timeout_s=PEER_FAILED_S, clock=clock)
    assert clock.monotonic() - start == pytest.approx(expected_s, abs=1.0)
