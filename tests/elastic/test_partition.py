"""A network that is cut between nodes which all reach the store: one part goes on, and nothing on the line is lost."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient.catalog.line import read_line
from resilient.store.open import open_store
from resilient.testing.invariants import check_run
from tests.elastic.namespaces import Network
from tests.elastic.nodes import Nodes

WHY_NOT = Network.why_not()

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")]

STEPS = 600


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(3) as network:
        yield network


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path / "job", nnodes="1:3", steps=STEPS)
    yield nodes
    nodes.close()


def start(nodes: Nodes, network: Network, number: int) -> None:
    nodes.start(
        f"n{number}",
        # gloo finds its interface by the name of the host, which all of these share.
        environ={"PET_LOCAL_ADDR": network.addresses[number], "GLOO_SOCKET_IFNAME": "eth0"},
        through=lambda command: network.on(number, command),
    )


def test_of_a_cut_network_one_part_goes_on_and_after_it_heals_all_do(nodes: Nodes, network: Network) -> None:
    for number in range(3):
        start(nodes, network, number)
    before = nodes.await_line(lambda line: line.world_size == 3 and line.step >= 15, timeout_s=240)
    network.cut(2, 0, 1)
    alone = nodes.await_line(lambda line: line.world_size == 2 and line.step >= before.step + 30, timeout_s=240)
    apart = [line for line in nodes.lines() if line.at > before.at and line.world_size == 1]
    assert not apart, "the part with fewer nodes waits, although it reaches the store"
    network.heal(2, 0, 1)
    nodes.await_line(lambda line: line.world_size == 3 and line.at > alone.at, timeout_s=240)
    assert nodes.await_exit("n0", "n1", "n2", timeout_s=300) == [0, 0, 0]
    store = open_store(nodes.place)
    assert check_run(store) == []
    line = read_line(store)
    assert line.commits[0].step == STEPS
    starts = [line.step for line in nodes.lines("resumed") if line.at > before.at]
    assert min(starts) >= before.step - 2 * 10, "at most a save in flight, and one interval"
    store.close()


def test_a_node_that_some_cannot_reach_is_left_out_from_the_start(nodes: Nodes, network: Network) -> None:
    network.cut(0, 1)
    for number in range(3):
        start(nodes, network, number)
    nodes.await_line(lambda line: line.world_size == 2 and line.step >= 10, timeout_s=240)
    assert all(line.world_size == 2 for line in nodes.lines())
    network.heal(0, 1)
    nodes.await_line(lambda line: line.world_size == 3, timeout_s=240)
    assert nodes.await_exit("n0", "n1", "n2", timeout_s=300) == [0, 0, 0]
    assert os.environ.get("RESILIENT_NODE_DIR") is None


@pytest.mark.skipif(shutil.which("tc") is None, reason="a slow link needs the command tc")
def test_a_node_behind_a_slow_link_holds_the_others_up_and_is_not_lost(nodes: Nodes, network: Network) -> None:
    for number in range(3):
        start(nodes, network, number)
    first = nodes.await_line(lambda line: line.world_size == 3, timeout_s=240)
    time.sleep(5)
    network.throttle(2, "16kbit")  # a few steps a second: far below what a loaded machine computes
    throttled = time.time()
    end = nodes.await_line(lambda line: line.at > throttled + 15, timeout_s=240)
    assert end.world_size == 3
    assert "is lost" not in nodes.output()
    before, after = (
        sum(start < line.at <= stop and line.rank == 0 for line in nodes.lines()) / (stop - start)
        for start, stop in ((first.at, throttled), (throttled + 2, end.at))
    )
    assert after < before / 2, "the exchange is what the link slows down"
