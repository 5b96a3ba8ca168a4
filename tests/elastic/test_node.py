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
    agent.restart()
    assert worker.restarting()
    agent.clear()
    assert worker.asked() is None
    assert not worker.restarting()


def test_parked_workers_are_known_by_local_rank(tmp_path: Path) -> None:
    agent, worker = Node(tmp_path), Node(tmp_path)
    second = Parked(kind="peer-failed", local_rank=1, pid=12)
    first = Parked(kind="resize", local_rank=0, pid=11, step=40)
    worker.park(second)
    worker.park(first)
    assert agent.parked() == [first, second]
    agent.clear()
    assert agent.parked() == []


def test_whoever_looks_at_what_is_asked_is_known_to_listen_and_the_agent_does_not_count(tmp_path: Path) -> None:
    agent, worker = Node(tmp_path), Node(tmp_path)
    assert agent.asked_last() is None
    assert agent.listen() == 0
    worker.asked()
    worker.asked()
    assert agent.listen() == 1
    agent.clear()
    assert agent.listen() == 0
    worker.asked()
    assert agent.listen() == 0, "a worker of an earlier life has been heard; the next one is another process"


def test_the_name_of_the_job_outlives_what_is_cleared(tmp_path: Path) -> None:
    agent, worker = Node(tmp_path), Node(tmp_path)
    assert worker.job() is None
    agent.name_job("abc")
    agent.clear()
    assert worker.job() == "abc"
