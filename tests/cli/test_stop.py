"""Asking a running job to stop, or to change its size, from the command line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import resilient
from resilient.catalog.requests import newest_request
from resilient.store.local import LocalStore
from tests.catalog.runs import dead_generation, save
from tests.cli.calling import call, called
from tests.lives import Life


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make ``tmp_path/run``, where one generation has saved a step and ended."""
    store = LocalStore(tmp_path / "run")
    save(store, dead_generation(store), 1)
    return tmp_path / "run"


def train_for_ever(place: str) -> None:
    @resilient.train(place, every=10**6)
    def main(run: resilient.Run) -> None:
        run.track(state={"w": torch.zeros(1)})
        for _ in run.steps(range(10**6)):
            time.sleep(0.01)

    main()


def test_stop_says_what_happens_and_waits_for_the_end(tmp_path: Path) -> None:
    place = tmp_path / "run"
    life = Life(1, tmp_path / "life", train_for_ever, str(place))
    end = time.monotonic() + 90
    while not (place / "generations/00000001.base.json").exists():
        assert life.alive, life.output()
        assert time.monotonic() < end, life.output()
        time.sleep(0.05)
    result = call("stop", place, "--why", "maintenance", "--wait", "--timeout", "60s")
    assert "asked to stop: it saves after the step that goes on, and ends with exit code 75" in result.stdout
    assert "it has ended" in result.stdout
    assert "nothing seems to be running" not in result.stderr
    assert life.wait() == [75]
    assert "by a request to stop (maintenance): saved" in life.output()
    assert called("ls", place)["checkpoints"]


def test_where_nothing_runs_that_is_said(run: Path) -> None:
    result = call("stop", run, "--wait")
    assert "nothing seems to be running" in result.stderr
    assert "it has ended" not in result.stdout
    found = called("stop", run)
    assert set(found) == {"run", "request", "launch", "running", "ended"}
    assert (found["running"], found["ended"]) == (False, None)
    assert newest_request(LocalStore(run))[0] == 2


def test_resize_asks_for_a_number_of_nodes(run: Path) -> None:
    assert "go on with 3 nodes: it saves first" in call("resize", run, "--nodes", 3).stdout
    found = called("resize", run, "--nodes", 1, "--why", "two for another job")
    assert set(found) == {"run", "request", "nodes", "launch", "running"}
    number, request = newest_request(LocalStore(run))
    assert number == 2
    assert request is not None
    assert (request.kind, request.nodes, request.why) == ("resize", 1, "two for another job")


@pytest.mark.parametrize("command", [["stop"], ["resize", "--nodes", "2"]], ids=["stop", "resize"])
def test_what_is_no_run_is_refused_and_nothing_is_written(command: list[str], run: Path, tmp_path: Path) -> None:
    assert called(*command, tmp_path / "nothing", code=10)["error"]["kind"] == "no-checkpoint"
    assert not (tmp_path / "nothing").exists()
    assert called(*command, f"{run}@1", code=2)["error"]["kind"] == "invalid-argument"
    assert newest_request(LocalStore(run)) == (0, None)


def test_numbers_that_make_no_sense_are_refused(run: Path) -> None:
    assert called("resize", run, "--nodes", 0, code=2)["error"]["kind"] == "invalid-argument"
    assert called("resize", run, code=2)["error"]["kind"] == "invalid-argument"
    assert called("stop", run, "--timeout", "soon", code=2)["error"]["kind"] == "invalid-argument"
