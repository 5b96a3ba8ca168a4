"""What is said between an agent and its workers is there whole, or not at all."""

from __future__ import annotations

from pathlib import Path

from resilient.elastic.node import Asked, Node, Parked


def test_what_is_asked_last_holds_and_nothing_after_a_clear(tmp_path: Path) -> None:
    agent, worker = Node(tmp_path), Node(tmp_path)
    assert worker.asked() is None
    agent.ask(Asked(kind="resize", why="a node has come"))
    agent.ask(Asked(kind="stop", why="SIGTERM"))
    assert worker.asked() == Asked(kind="stop", why="SIGTERM")
    agent.clear()
    assert worker.asked() is None


def test_parked_workers_are_known_by_local_rank(tmp_path: Path) -> None:
    agent, worker = Node(tmp_path), Node(tmp_path)
    second = Parked(kind="peer-failed", local_rank=1, pid=12)
    first = Parked(kind="resize", local_rank=0, pid=11, step=40)
    worker.park(second)
    worker.park(first)
    assert agent.parked() == [first, second]
    agent.clear()
    assert agent.parked() == []
