"""``resilient run``: the right flags from what is asked and what a scheduler says; what does not fit is refused."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from resilient.cli.main import main
from resilient.config import Cluster, read_cluster


@pytest.fixture(autouse=True)
def hears_when_its_terminal_goes() -> Iterator[None]:
    """Let what is started here hear SIGHUP, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def call(*arguments: str, code: int = 0, **environ: str) -> Result:
    silent = dict.fromkeys([name for name in os.environ if name.startswith(("SLURM_", "RESILIENT_"))])
    result = CliRunner().invoke(main, ["run", "--dry-run", *arguments], env={**silent, **environ})
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


def flags(*arguments: str, **environ: str) -> dict[str, Any]:
    found = json.loads(call("--json", *arguments, "train.py", code=0, **environ).stdout)["flags"]
    assert all(flag["why"] for flag in found)
    return {flag["name"]: flag["value"] for flag in found}


def test_a_dry_run_shows_the_command_and_says_why_each_flag_is_there() -> None:
    lines = call("--store", "s3://b/run", "--nodes", "2:4", "train.py", "--lr", "1e-4").stdout.splitlines()
    assert lines[0].endswith("train.py --lr 1e-4")
    assert " -m resilient.elastic.torchrun --nnodes=2:4 --nproc-per-node=auto --rdzv-backend=resilient " in lines[0]
    shown = [line.split()[0] for line in lines[3:]]
    assert shown == [word.partition("=")[0] for word in lines[0].split() if word.startswith("--") and word != "--lr"]
    assert any("SIGUSR1 of SLURM would else end torchrun" in line for line in lines)


def test_torchrun_understands_every_flag() -> None:
    from torch.distributed.run import parse_args

    document = json.loads(
        call("--json", "--store", "/p", "--nodes", "2", "--torchrun=--tee=3", "a.py", "--x", POD_IP="1.2.3.4").stdout
    )
    parsed = parse_args(document["command"][3:])  # type: ignore[no-untyped-call]
    assert (parsed.training_script, parsed.training_script_args, parsed.tee) == ("a.py", ["--x"], "3")
    assert (parsed.nnodes, parsed.rdzv_backend, parsed.rdzv_endpoint) == ("2:2", "resilient", "/p")
    assert (parsed.shutdown_timeout, parsed.max_restarts, parsed.local_addr) == (30, 100, "1.2.3.4")
    assert parsed.signals_to_handle.split(",")[-2:] == ["SIGUSR1", "SIGUSR2"]
    assert all(hasattr(signal, name) for name in parsed.signals_to_handle.split(","))


def test_one_node_needs_no_place() -> None:
    found = flags()
    assert found["--nnodes"] == "1:1"
    assert "--standalone" in found
    assert "--rdzv-backend" not in found
    assert flags("--store", "/p")["--rdzv-backend"] == "resilient"


def test_a_module_and_its_arguments_are_handed_on() -> None:
    words = json.loads(call("--json", "-m", "package.train", "--dry-run", "--", "-x").stdout)["command"]
    assert words[-5:] == ["-m", "package.train", "--dry-run", "--", "-x"]


def test_slurm_says_how_many_nodes_and_workers_and_names_the_job() -> None:
    slurm = {"SLURM_NNODES": "4", "SLURM_JOB_ID": "71", "SLURM_GPUS_ON_NODE": "8", "SLURM_LOCALID": "0"}
    found = flags("--store", "/p", "--grace", "2min", **slurm)
    assert (found["--nnodes"], found["--nproc-per-node"], found["--rdzv-id"]) == ("4:4", "8", "71")
    assert found["--shutdown-timeout"] == "120"
    found = flags("--store", "/p", "--nodes", "2:4", "--nproc-per-node", "4", "--id", "mine", **slurm)
    assert (found["--nnodes"], found["--nproc-per-node"], found["--rdzv-id"]) == ("2:4", "4", "mine")
    assert flags("--store", "/p", RESILIENT_GRACE_S="90", **slurm)["--shutdown-timeout"] == "90"
    assert read_cluster({}) == Cluster()


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert "SIGHUP" not in flags()["--signals-to-handle"]
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "SIGHUP" in flags()["--signals-to-handle"]


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (["--nodes", "2"], {}, "2 nodes need a place"),
        (["--nodes", "4:2"], {}, "must be N or MIN:MAX"),
        (["--nodes", "0"], {}, "must be N or MIN:MAX"),
        (["--grace", "soon"], {}, "must be a duration"),
        (["--store", "/p"], {"SLURM_LOCALID": "3"}, "this is task 3 of its node"),
        ([], {"SLURM_NNODES": "many"}, "SLURM_NNODES is 'many'"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: list[str], environ: dict[str, str], words: str) -> None:
    result = call(*arguments, "train.py", code=2, **environ)
    assert words in result.stderr
    assert not result.stdout


def test_json_is_for_a_dry_run() -> None:
    result = CliRunner().invoke(main, ["run", "--json", "train.py"])
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["kind"] == "invalid-argument"
