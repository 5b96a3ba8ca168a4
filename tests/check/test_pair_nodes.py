"""Nodes that are tested in pairs for real: who is slow, wrong, crashes, hangs or is lost is named, and nobody else."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from resilient.check.pair_report import ALL_REDUCE, CLOCK
from resilient.check.result import Result
from tests.check.nodes import check_nodes
from tests.figures import Figures

FAILING = ("wrong", "crash")


def said(results: list[Result]) -> str:
    (result,) = (each for each in results if each.name == ALL_REDUCE)
    return str(result.status)


@pytest.mark.proof
def test_a_slow_and_a_failing_node_are_found(
    tmp_path: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    """Of 4 to 8 nodes one is three times as slow, another one sums wrongly or crashes: they are named, nobody else."""
    rounds = figures("node-check", "a slow and a failing node among 4 to 8 are found")
    for trial in range(len(rounds), count(2, 20)):
        seed = secrets.randbits(32)
        rng = Random(seed)
        nodes = 4 + trial % 5
        slow, failing = rng.sample(range(nodes), 2)
        fault = FAILING[trial % 2]
        print(f"trial {trial}, seed {seed}: of {nodes} nodes {slow} is slow, {failing} is bad ({fault})")
        start = time.monotonic()
        found = check_nodes(nodes, tmp_path / str(trial), {slow: "slow", failing: fault})
        wall_s = time.monotonic() - start
        wanted = ["slow" if node == slow else "failed" if node == failing else "ok" for node in range(nodes)]
        assert [said(found[f"host{node}"]) for node in range(nodes)] == wanted, found
        ratio = next(each.figure for each in found[f"host{slow}"] if each.name == ALL_REDUCE)
        assert ratio is not None
        rounds.add(nodes=nodes, fault=fault, slow_ratio=round(ratio, 2), wall_s=round(wall_s, 1), named=2)


def test_a_node_that_hangs_and_one_that_is_lost_are_named(tmp_path: Path) -> None:
    found = check_nodes(6, tmp_path, {2: "hang", 4: "die"}, timeout_s=4.0)
    assert [said(found[f"host{node}"]) for node in range(6)] == ["ok", "ok", "failed", "ok", "failed", "ok"], found


def test_a_clock_that_is_5_ms_off_is_named_and_all_else_is_well(tmp_path: Path) -> None:
    found = check_nodes(3, tmp_path, {1: "ahead"})
    for results in found.values():
        assert [each.name for each in results] == ["alone", ALL_REDUCE, CLOCK], results
        assert [each.status for each in results[:2]] == ["ok", "ok"], results
    clocks = [found[f"host{node}"][2] for node in range(3)]
    assert [each.status for each in clocks] == ["ok", "failed", "ok"], clocks
    assert 5.0 < (clocks[1].figure or 0.0) < 6.0
    assert " ms ahead of host" in clocks[1].line
    assert "chrony" in clocks[1].remedy
    assert (clocks[0].figure or 0.0) < 1.0, "of one machine, the others have one clock"
