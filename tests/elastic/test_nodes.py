"""Whole nodes die, come, wait and end under torchrun, and training goes on: the backend as users start it."""

from __future__ import annotations

import os
import random
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from resilient.catalog.line import read_line
from resilient.elastic.ledger import Ledger
from resilient.store.open import open_store
from resilient.testing.proxy import FaultProxy
from tests.elastic.nodes import Line, Nodes
from tests.figures import Figures
from tests.s3_server import S3Server

DETECTION_S = 5.0
FIRST_STEP_S = 30.0  # beyond the start of a process


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def start(**how: Any) -> Nodes:
        made.append(Nodes(tmp_path / f"job-{len(made)}", **how))
        return made[-1]

    yield start
    for each in made:
        each.close()


def newest(nodes: Nodes) -> Line:
    return max(nodes.lines(), key=lambda line: line.at)


def by_rank(nodes: Nodes) -> dict[int, str]:
    """Return which node has which rank now."""
    names = {node.pid: name for name, node in nodes.nodes.items()}
    size = newest(nodes).world_size
    last = {line.rank: names.get(line.agent, "") for line in nodes.lines() if line.world_size == size}
    return {rank: last[rank] for rank in range(size)}


def declared_after(nodes: Nodes, at: float) -> float:
    """Return how long after ``at`` the first member was declared lost, as the store has it."""
    ledger = Ledger(open_store(nodes.place), "job")
    last = ledger.newest_closed()
    assert last is not None
    lost = [
        datetime.fromisoformat(each.created).timestamp()
        for number in range(1, last.round + 1)
        for each in ledger.lost(number, ledger.names(number)).values()
    ]
    # On a busy machine the others may have seen the end of it before whoever killed it has noted the time.
    return max(0.0, min(moment for moment in lost if moment > at - 1.0) - at)


@pytest.mark.field_report("BR-187", "BR-194")
@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_a_node_that_dies_is_gone_on_without_and_one_that_comes_costs_no_step(
    job: Callable[..., Nodes], count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    """A node of three is killed at a random moment, the first one in a third of the cases; then one comes instead."""
    deaths = figures("node-deaths", "A whole node of three is killed at a random moment, the first one included")
    joins = figures("late-nodes", "A node joins a job that trains on two")
    rounds, done = count(2, 20), len(deaths)
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    nodes = job(nnodes="1:3", steps=10**6)
    store = open_store(nodes.place)
    for name in "abc":
        nodes.start(name)
    nodes.await_line(lambda line: line.world_size == 3 and line.step >= 25)
    for number in range(done, rounds):
        time.sleep(rng.uniform(0.5, 3))
        ranks = by_rank(nodes)
        doomed = 0 if number % 3 == 0 else rng.choice([1, 2])
        committed, before = read_line(store).commits[0].step, newest(nodes).step
        at = nodes.kill(ranks[doomed])
        first = nodes.await_line(lambda line, at=at: line.at > at and line.world_size == 2)  # type: ignore[misc]
        began = max(line.at for line in nodes.lines("start") if line.at < first.at)
        detected_s = declared_after(nodes, at)
        deaths.add(
            rank=doomed,
            detected_s=round(detected_s, 2),
            stopped_to_started_s=round(began - at, 2),
            first_step_s=round(first.at - at, 2),
            steps_lost=before + 1 - first.step,
        )
        assert detected_s <= DETECTION_S
        assert began - at <= FIRST_STEP_S
        assert first.step > committed, "what was committed is not done again"

        time.sleep(1)
        at = time.time()
        nodes.start(ranks[doomed])
        first = nodes.await_line(lambda line, at=at: line.at > at and line.world_size == 3)  # type: ignore[misc]
        last = max((line for line in nodes.lines() if line.at < first.at and line.world_size == 2), key=lambda x: x.at)
        joins.add(
            first_step_s=round(first.at - at, 2),
            stood_s=round(first.at - last.at, 2),
            steps_lost=last.step + 1 - first.step,
        )
        assert first.step == last.step + 1, "no completed step is lost"
    agents = {node.pid for node in nodes.nodes.values()}
    assert {line.agent for line in nodes.lines()} >= agents


@pytest.mark.timeout(600)
def test_a_node_that_falls_silent_is_noticed_and_comes_back_as_a_new_one(job: Callable[..., Nodes]) -> None:
    nodes = job(nnodes="1:3", steps=10**6)
    for name in "abc":
        nodes.start(name)
    nodes.await_line(lambda line: line.world_size == 3 and line.step >= 3)
    silent = by_rank(nodes)[0]
    at = nodes.freeze(silent)
    first = nodes.await_line(lambda line: line.at > at and line.world_size == 2)
    assert declared_after(nodes, at) <= DETECTION_S
    time.sleep(1)
    at = time.time()
    nodes.thaw(silent)
    nodes.await_line(lambda line: line.at > at and line.world_size == 3)
    assert max(line.step for line in nodes.lines()) > first.step
    assert nodes.nodes[silent].poll() is None


@pytest.mark.timeout(600)
def test_a_spare_takes_the_place_of_a_lost_node_and_a_death_at_the_end_holds_nobody(job: Callable[..., Nodes]) -> None:
    nodes = job(nnodes="2:2", steps=700)
    for name in "ab":
        nodes.start(name)
    nodes.await_line(lambda line: line.world_size == 2)
    nodes.start("c", environ={"TOY_LINGERS_S": "60"})
    stranger = nodes.start("d", arguments=[nodes.place, str(nodes.log), "7"])
    nodes.await_text("c", "waiting to be let in")
    nodes.kill("a")
    nodes.start("e")
    spare = nodes.nodes["c"].pid
    nodes.await_line(lambda line: line.agent == spare)
    assert stranger.wait(timeout=120) == 1
    assert "this node does not fit in" in nodes.output("d")
    nodes.await_text("e", "waiting to be let in")
    kept = nodes.nodes["b"].pid
    nodes.await_line(lambda line: line.agent == kept, what="end", timeout_s=240)
    time.sleep(1)
    assert nodes.nodes["b"].poll() is None, "the other node still works, and uses its key-value server"
    nodes.kill("c")
    start = time.monotonic()
    assert nodes.await_exit("b", "e", timeout_s=60) == [0, 0], "one has done its work, the other one was not needed"
    assert time.monotonic() - start < 30


@pytest.mark.s3
@pytest.mark.timeout(600)
@pytest.mark.proof
def test_with_the_store_of_the_rendezvous_away_nobody_is_declared_dead_and_training_goes_on(
    job: Callable[..., Nodes],
    s3_server: S3Server,
    count: Callable[[int, int], int],
    figures: Callable[[str, str], Figures],
) -> None:
    away_s = count(12, 120)
    kept = figures("rendezvous-away", "the store of the rendezvous is away while two nodes train, then one is killed")
    nodes = job(nnodes="1:2", steps=10**6)
    with FaultProxy(s3_server.endpoint) as wire:
        environ = {**s3_server.environment(), "AWS_ENDPOINT_URL": wire.url}
        endpoint = s3_server.fresh_url()
        for name in "ab":
            nodes.start(name, endpoint=endpoint, environ=environ)
        nodes.await_line(lambda line: line.world_size == 2)
        with wire.outage():
            start = newest(nodes)
            time.sleep(away_s)
            end = newest(nodes)
            assert end.step > start.step + 4 * away_s
            assert end.world_size == 2
        time.sleep(4)
        assert "is lost" not in nodes.output()
        at = nodes.kill("a")
        first = nodes.await_line(lambda line: line.at > at and line.world_size == 1)
    kept.add(away_s=away_s, steps_meanwhile=end.step - start.step, declared_lost=0, alone_after_s=first.at - at)


@pytest.mark.timeout(600)
def test_where_nodes_share_no_place_a_key_value_server_serves_and_its_host_alone_is_special(
    job: Callable[..., Nodes],
) -> None:
    nodes = job(nnodes="1:3", steps=10**6)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"localhost:{free.getsockname()[1]}"
    for name in "ab":
        nodes.start(name, endpoint=endpoint)
        time.sleep(1)  # so that it is the first one that serves
    nodes.await_line(lambda line: line.world_size == 2)
    nodes.start("late", endpoint=endpoint)
    both = nodes.await_line(lambda line: line.world_size == 3)
    at = nodes.freeze("b")
    nodes.await_line(lambda line: line.at > at and line.world_size == 2 and line.step > both.step)
    nodes.kill("b")
    at = nodes.kill("a")
    assert nodes.await_exit("late", timeout_s=120) != [0]
    assert time.time() - at < 60
    assert f"the key-value server of c10d://{endpoint} is gone" in nodes.output("late")


@pytest.mark.timeout(600)
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="a host name of its own needs root")
def test_a_node_whose_device_fails_leaves_the_job_and_the_others_go_on(job: Callable[..., Nodes]) -> None:
    nodes = job(nnodes="2:3", steps=10**6, max_restarts=3, conf="check=light")

    def start(name: str, host: str, *, sick: bool) -> None:
        # A host of its own, for all that its agent and its workers can tell.
        nodes.start(
            name,
            environ={"GLOO_SOCKET_IFNAME": "lo", "TOY_IS_SICK": "1" if sick else ""},
            through=lambda command: ["unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$@"', "sh", *command],
        )

    for name in "abc":
        start(name, f"host-{name}", sick=name == "b")
    failed = nodes.await_line(lambda line: line.world_size == 3 and line.step >= 12, timeout_s=240)
    assert nodes.await_exit("b", timeout_s=120) != [0]
    assert "takes no more part in the job job: generation 1 failed by device-hardware" in nodes.output("b")
    nodes.await_line(lambda line: line.at > failed.at and line.world_size == 2 and line.step > failed.step)
    start("again", "host-b", sick=False)
    assert nodes.await_exit("again", timeout_s=120) != [0]
    assert "takes no more part" in nodes.output("again")


@pytest.mark.timeout(600)
def test_a_training_that_does_not_know_this_library_goes_on_too_with_the_restarts_it_has(
    job: Callable[..., Nodes],
) -> None:
    nodes = job(nnodes="1:2", steps=10**6, max_restarts=3)
    for name in "ab":
        nodes.start(name, environ={"TOY_IS_DEAF": "1"})
    nodes.await_line(lambda line: line.world_size == 2)
    at = nodes.kill(by_rank(nodes)[0])
    nodes.await_line(lambda line: line.at > at and line.world_size == 1)


@pytest.mark.timeout(600)
def test_a_size_that_is_asked_for_and_a_stop_lose_no_step(job: Callable[..., Nodes]) -> None:
    from resilient.catalog.requests import ask
    from resilient.clock import SYSTEM_CLOCK

    nodes = job(nnodes="1:2", steps=10**6, max_restarts=3)
    for name in "ab":
        nodes.start(name)
    nodes.await_line(lambda line: line.world_size == 2 and line.step >= 3)
    store = open_store(nodes.place)
    ask(store, "resize", nodes=1, why="another job", clock=SYSTEM_CLOCK)
    first = nodes.await_line(lambda line: line.world_size == 1)
    assert first.step == max(line.step for line in nodes.lines() if line.world_size == 2) + 1
    assert all(node.poll() is None for node in nodes.nodes.values()), "the other one is a spare"
    ask(store, "stop", why="maintenance", clock=SYSTEM_CLOCK)
    assert sorted(nodes.await_exit("a", "b")) == [75, 75]
