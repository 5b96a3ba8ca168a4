"""G1, G4, G7, G9: the newest state survives the processes in the tiers of the nodes; the next life continues it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import resilient
from tests.lives import Life, writers_of
from tests.run.tiered import (
    events,
    lose_data,
    newest_in_tiers,
    no_memory_left_behind,
    started_from,
    tier_of,
    train,
)

TOTAL = 60


@pytest.fixture(autouse=True)
def memory(tmp_path: Path) -> Iterator[None]:
    with no_memory_left_behind(tmp_path):
        yield


def settings(tiers: str, **more: object) -> dict[str, Any]:
    return {"every": 10, "tiers": [tiers], "tier_every": 1, "keep": resilient.Keep(last=3), **more}


def committed(place: Path) -> int:
    return max((found.step for found in resilient.checkpoints(place)), default=0)


def wait_for(what: Callable[[], bool], timeout_s: float = 90) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, f"not within {timeout_s:g} s"
        time.sleep(0.01)


def stakes(folder: Path) -> list[str]:
    return events(folder, "0", "AtStake")


def promised(folder: Path) -> int:
    """Return from which step on a lost node was said to cost anything, before the kill."""
    return max(int(found[1]) for each in stakes(folder) if (found := re.search(r"node_step=(\d+)", each)))


def committed_when_started(folder: Path) -> int:
    return len(events(folder, "0", "SaveCommitted"))


def assert_as_if_uninterrupted(folder: Path, whole: Path) -> None:
    """Compare the last life with one rank that was left alone; sums over ranks are made in another order."""
    with np.load(whole / "final-w.npz") as expected, np.load(folder / "final-1.npz") as found:
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    alone: dict[str, object] = {"every": 10**6}
    Life(1, folder / "life", train, str(folder / "run"), str(folder), "w", alone, TOTAL, 0.0).succeed()
    return folder


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_what_was_in_a_tier_is_not_lost_when_all_processes_are_killed(
    tmp_path: Path, uninterrupted: Path, tier: str
) -> None:
    where = settings("memory" if tier == "memory" else str(tmp_path / "tier"))
    place = tmp_path / "run"
    life = Life(2, tmp_path / "first", train, str(place), str(tmp_path), "0", where, TOTAL, 0.1)
    base = Path("/dev/shm") if tier == "memory" else tmp_path / "tier"
    wait_for(lambda: committed(place) >= 10 and newest_in_tiers(place, base, 2) > committed(place))
    life.kill_with_writers()
    life.wait()
    newest, stored = newest_in_tiers(place, base, 2), committed(place)
    lose_data(place)  # so that only the tiers can have it

    Life(2, tmp_path / "second", train, str(place), str(tmp_path), "1", where, TOTAL, 0.0).succeed()

    assert started_from(tmp_path, "1") == started_from(tmp_path, "1", 1) == newest
    assert newest > stored
    (finished,) = events(tmp_path, "1", "TiersFinished")
    assert f"step={newest}," in finished
    for rank in range(2):
        (sources,) = events(tmp_path, "1", "RestoredFromTiers", rank)
        name = "memory" if tier == "memory" else str(base)
        assert f"{newest:012d}-{rank:06d}-0', '{name}'" in sources, "each node reads its own shard from its own tier"
    assert_as_if_uninterrupted(tmp_path, uninterrupted)
    assert newest_in_tiers(place, base, 2) == -1, "at the end of the run all of it is in the store"


@pytest.mark.parametrize("nodes", ["012", "02"])
def test_a_lost_node_costs_the_steps_since_its_last_copy(tmp_path: Path, uninterrupted: Path, nodes: str) -> None:
    base = tmp_path / "tier"
    where = settings(str(base), every=10**6, peer_copies=1)  # nothing is in the store before the end
    place = tmp_path / "run"
    life = Life(3, tmp_path / "first", train, str(place), str(tmp_path), "0", where, TOTAL, 0.1)
    wait_for(lambda: any("node_step=" in each and "node_step=None" not in each for each in stakes(tmp_path)))
    life.kill_with_writers()
    life.wait()
    shutil.rmtree(tier_of(tmp_path, 1))
    newest = newest_in_tiers(place, base, 3)

    again = Life(len(nodes), tmp_path / "second", train, str(place), str(tmp_path), "1", where, TOTAL, 0.0, nodes)
    again.succeed()

    assert committed_when_started(tmp_path) == 0
    assert started_from(tmp_path, "1") == newest >= promised(tmp_path) > 0
    (sources,) = events(tmp_path, "1", "RestoredFromTiers")
    assert str(base) in sources
    assert_as_if_uninterrupted(tmp_path, uninterrupted)


def test_a_worker_that_is_killed_costs_its_agent_a_restart_from_memory(tmp_path: Path) -> None:
    place, log = tmp_path / "run", tmp_path / "log"
    program = Path(__file__).with_name("tiered_restart.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    with log.open("wb") as file:
        done = subprocess.run(
            [*launch, str(program), str(place), str(tmp_path), "10", "1"],
            stdout=file,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RESILIENT_TIERS": "memory", "RESILIENT_TIER_EVERY": "1"},
            timeout=240,
            check=False,
        )
    text = log.read_text(errors="replace")
    assert done.returncode == 0, text
    (killed,) = re.findall(r"KILLED at (\d+)", text)
    starts = set(map(int, re.findall(r"LIFE 1 rank \d of 2 from (\d+)", text)))
    assert len(starts) == 1, text
    # The step that it was in had begun; the boundary before may have been on its way to the tiers of both.
    assert int(killed) - starts.pop() <= 2, text
    (sources,) = [each for each in (tmp_path / "events-1-0").read_text().splitlines() if "RestoredFromTiers(" in each]
    assert "sources=(('memory', " in sources
    assert str(place) not in sources, "one node has all of it"
    assert text.count("DONE rank") == 2


@pytest.mark.field_report("BR-186", "BR-193")
def test_the_agents_that_are_left_go_on_from_the_copies_of_the_node_that_is_gone(tmp_path: Path) -> None:
    place, base = tmp_path / "run", tmp_path / "tier"
    port = free_port()
    nodes = [node(tmp_path, place, base, number, port) for number in range(3)]
    try:
        wait_for(lambda: any("node_step=" in each and "node_step=None" not in each for each in stakes(tmp_path)), 150)
        worker = int((tmp_path / "pid-rack-2-0").read_text())
        for pid in [nodes[2].pid, *writers_of(worker), worker]:
            os.kill(pid, signal.SIGKILL)
        (lost,) = [path.parent for path in base.glob("resilient-*/*/*/owner.json") if owner(path) == nodes[2].pid]
        shutil.rmtree(lost)
        newest = newest_in_tiers(place, base, 3)
        codes = [each.wait(200) for each in nodes[:2]]
    finally:
        for each in nodes:
            each.kill()
            each.wait(10)
    text = "\n".join((tmp_path / f"log-{number}").read_text(errors="replace") for number in range(2))
    assert codes == [0, 0], text
    starts = set(map(int, re.findall(r"LIFE \d+ rank \d of 2 from (\d+)", text)))
    assert starts == {newest}, text
    assert newest >= promised(tmp_path) > 0
    assert events(tmp_path, "0", "SaveCommitted") == [], "nothing was in the store before"
    assert re.search(rf"restored step {newest}: .* % from {base}", text), text


def node(folder: Path, place: Path, base: Path, number: int, port: int) -> subprocess.Popen[bytes]:
    """Start the agent of one node."""
    program = Path(__file__).with_name("tiered_restart.py")
    # Stock torch's rendezvous ends with the node that holds it: that is the first one, which is not the one to be lost.
    conf = f"--rdzv-conf=last_call_timeout=3,is_host={int(number == 0)}"
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", conf]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1", *rendezvous]
    words = ["--max-restarts=3", "--rdzv-id=tiers", str(program), str(place), str(folder), str(10**6), "0"]
    tiers = {"RESILIENT_TIERS": str(base), "RESILIENT_TIER_EVERY": "1", "RESILIENT_PEER_COPIES": "1"}
    labels = {"RESILIENT_NODE_LABEL": f"rack-{number}", "OMP_NUM_THREADS": "1"}
    with (folder / f"log-{number}").open("wb") as log:
        return subprocess.Popen([*launch, *words], stdout=log, stderr=log, env={**os.environ, **tiers, **labels})


def owner(path: Path) -> int:
    return int(json.loads(path.read_text())["pid"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
