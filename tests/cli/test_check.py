"""``resilient check``: by hand on one node, and by torchrun on several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from resilient.check.result import Result, Status, failed, passed, skipped
from resilient.cli import check as check_module
from tests.cli.calling import call, called
from tests.figures import Figures
from tests.lives import _free_port

SLOW = Result(
    name="memory bandwidth",
    status=Status.SLOW,
    line="one thread copies only 0.40 GiB/s",
    remedy="look for a memory channel that is missing",
    figure=0.4,
    unit="GiB/s",
    limit=1.0,
    node="node17",
)
BAD = msgspec.structs.replace(
    failed("PCIe link", "the GPU at 0000:3b:00.0 runs at x8 of x16", "reseat the card", subject="0000:3b:00.0"),
    node="node17",
)
WELL = msgspec.structs.replace(passed("ports", "can be listened on"), node="node17")
OPEN = msgspec.structs.replace(skipped("store", "no place was named (--place)"), node="node17")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """What the checks of the node find, in place of looking: to be filled by a test."""
    results: list[Result] = []
    monkeypatch.setattr(check_module, "run_checks", lambda level, **_: results)
    return results


def test_the_exit_code_says_how_it_ended(found: list[Result]) -> None:
    found += [WELL, OPEN]
    assert "is fit for training" in call("check").stdout
    found.insert(0, SLOW)
    assert "warning: memory bandwidth: one thread copies only 0.40 GiB/s" in call("check", code=3).stderr
    found.append(BAD)
    result = call("check", code=4)
    rows = result.stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["result", "failed", "slow", "ok", "skipped"]
    assert " ".join(rows[2].split()) == "slow memory bandwidth 0.4 GiB/s 1 GiB/s one thread copies only 0.40 GiB/s"
    assert "error: PCIe link: the GPU at 0000:3b:00.0 runs at x8 of x16\nhint: reseat the card" in result.stderr
    assert "fit for training" not in result.stdout


def test_json_has_every_result(found: list[Result]) -> None:
    found += [SLOW, OPEN]
    said = called("check", "--level", "full", code=3)
    assert (said["status"], said["level"]) == ("slow", "full")
    assert msgspec.convert(said["results"], list[Result]) == [SLOW, OPEN]


def test_a_real_node_with_a_bad_place_fails(tmp_path: Path) -> None:
    only = ("--only", "shared-memory", "--only", "store")
    (tmp_path / "file").write_text("")
    said = called("check", *only, "--place", tmp_path / "file", code=4)
    assert {each["name"]: each["status"] for each in said["results"]} == {"/dev/shm": "ok", "store": "failed"}
    said = called("check", *only, "--place", tmp_path / "run")
    assert {each["name"] for each in said["results"]} == {"/dev/shm", "store", "store bandwidth", "store clock"}
    assert called("check", "--only", "everything", code=2)["error"]["kind"] == "invalid-argument"


def test_an_earlier_record_is_compared_with(found: list[Result], tmp_path: Path) -> None:
    before = msgspec.structs.replace(SLOW, status=Status.OK, figure=10.0)
    now = msgspec.structs.replace(before, figure=5.0)
    found.append(before)
    (tmp_path / "record.json").write_text(call("check", "--json").stdout)
    found[:] = [now]
    said = called("check", "--reference", tmp_path / "record.json", code=3)
    assert said["results"][0]["line"] == "5 GiB/s, 0.50 of what this node once had (10)"
    assert called("check", "--reference", tmp_path / "nothing", code=2)["error"]["kind"] == "invalid-argument"


def test_other_workers_of_a_node_leave_it_to_the_first(found: list[Result], monkeypatch: pytest.MonkeyPatch) -> None:
    found.append(BAD)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert call("check").stdout == ""


def torchrun(node: int, port: int, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start one node of two; its output goes to ``folder``."""
    folder.mkdir(exist_ok=True)
    command = [
        str(Path(sys.executable).with_name("torchrun")),
        "--nnodes=2",
        "--nproc-per-node=2",
        f"--node-rank={node}",
    ]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=check", "--local-addr=127.0.0.1"]
    command += ["--no-python", str(Path(sys.executable).with_name("resilient")), "check", *arguments]
    with (folder / f"out-{node}").open("w") as out, (folder / f"err-{node}").open("w") as err:
        return subprocess.Popen(command, stdout=out, stderr=err, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.proof
def test_two_nodes_under_torchrun_are_tested_together(
    tmp_path: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    """As users start it: one node prints for both, and both end alike."""
    rounds = figures("node-check-torchrun", "`torchrun --nnodes=2 --no-python resilient check --level full`")
    port = _free_port()
    some = [] if count(0, 1) else ["--only", "shared-memory", "--only", "pairs"]
    nodes = [torchrun(node, port, tmp_path / "nodes", "--level", "full", "--json", *some) for node in range(2)]
    try:
        codes = [node.wait(200) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    output = "\n".join(path.read_text()[-3000:] for path in sorted((tmp_path / "nodes").iterdir()))
    said = [json.loads(text) for number in range(2) if (text := (tmp_path / "nodes" / f"out-{number}").read_text())]
    # Whichever agent torchrun makes node 0; a machine that is short of something says so, on both nodes.
    by_node = [{each["node"] for each in one["results"]} for one in said]
    assert sorted(map(len, by_node)) == [1, 2], output
    both = said[by_node.index(max(by_node, key=len))]
    pairs = [each for each in both["results"] if each["name"] == "all-reduce in pairs"]
    assert [each["status"] for each in pairs] == ["ok", "ok"], output
    clocks = [each for each in both["results"] if each["name"] == "clock against others"]
    assert [each["status"] for each in clocks] == ["ok", "ok"], output
    assert codes == ([0, 0] if both["status"] == "ok" else [1, 1]), output
    assert len({one["status"] for one in said}) == 1, output
    rounds.add(status=both["status"], results=len(both["results"]))
