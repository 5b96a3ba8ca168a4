"""The batch scripts and the manifest, as far as they can be tried without a cluster: the scheduler is played."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from resilient.cli.main import main

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples/slurm").glob("*.sbatch"))
MANIFEST = ROOT / "examples/kubernetes/job.yaml"
LIMIT_S = 60.0

SRUN = """#!/bin/bash
# Hands signals on to its task, and ends with its exit code, as srun does.
printf '%s\\n' "$@" > "$PLAYED/srun"
while [[ $1 == --* ]]; do shift; done
"$@" & task=$!
trap 'echo USR1 >> "$PLAYED/signals"; kill -USR1 $task' USR1
echo > "$PLAYED/ready"
wait $task; code=$?
while kill -0 $task 2>/dev/null; do wait $task; code=$?; done
exit $code
"""
RESILIENT = """#!/bin/bash
printf '%s\\n' "$@" > "$PLAYED/resilient"
trap 'exit 75' USR1
for _ in $(seq 600); do [ -e "$PLAYED/end" ] && exit $(cat "$PLAYED/end"); sleep 0.05; done
exit 1
"""
SCONTROL = """#!/bin/bash
echo "$@" > "$PLAYED/scontrol"
"""


@pytest.fixture
def played(tmp_path: Path) -> Path:
    for name, text in (("srun", SRUN), ("resilient", RESILIENT), ("scontrol", SCONTROL)):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def submit(script: Path, played: Path) -> subprocess.Popen[bytes]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environ |= {"PATH": f"{played / 'bin'}:{environ['PATH']}", "PLAYED": str(played), "STORE": "/place"}
    job = subprocess.Popen(["bash", str(script)], env=environ | {"SLURM_NNODES": "4", "SLURM_JOB_ID": "71"})
    end_s = time.monotonic() + LIMIT_S
    while not ((played / "ready").exists() and (played / "resilient").exists()):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    time.sleep(0.3)  # until the traps are there
    return job


def accepted(*arguments: str, **environ: str) -> dict[str, Any]:
    """Return the flags of torchrun that a command line of the real ``resilient`` leads to."""
    assert arguments[0] == "run"
    result = CliRunner().invoke(main, ["run", "--dry-run", "--json", *arguments[1:]], env=environ)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    return {**{flag["name"]: flag["value"] for flag in document["flags"]}, "command": document["command"]}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_one_and_its_command_is_understood(script: Path, played: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    job = submit(script, played)
    (played / "end").write_text("0")
    assert job.wait(LIMIT_S) == 0
    assert not (played / "scontrol").exists()
    words = (played / "srun").read_text().splitlines()
    assert words[:4] == ["--ntasks-per-node=1", "--kill-on-bad-exit=0", "resilient", "run"]
    flags = accepted(*words[3:], SLURM_NNODES="4", SLURM_JOB_ID="71", SLURM_LOCALID="0", SLURM_GPUS_ON_NODE="8")
    assert (flags["--nnodes"], flags["--rdzv-endpoint"], flags["--rdzv-id"]) == ("2:4", "/place", "71")
    assert flags["--nproc-per-node"] == "8"
    program = flags["command"][flags["command"].index("examples/gpt/ddp.py")]
    assert (ROOT / program).exists()
    notice = re.findall(r"^#SBATCH --signal=(?:B:)?USR1@(\d+)$", script.read_text(), re.MULTILINE)
    assert int(flags["--shutdown-timeout"]) < int(notice[0])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("code", [75, 1])
def test_only_a_stop_goes_back_into_the_queue(script: Path, code: int, played: Path) -> None:
    job = submit(script, played)
    (played / "end").write_text(str(code))
    assert job.wait(LIMIT_S) == code
    requeued = (played / "scontrol").read_text() if (played / "scontrol").exists() else ""
    assert requeued == ("requeue 71\n" if code == 75 else "")


def test_a_notice_to_the_script_reaches_the_step_and_is_waited_for(played: Path) -> None:
    job = submit(ROOT / "examples/slurm/notice_to_script.sbatch", played)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(LIMIT_S) == 75
    assert (played / "signals").read_text() == "USR1\n"
    assert (played / "scontrol").read_text() == "requeue 71\n"


def test_the_manifest_is_a_job_whose_command_is_understood() -> None:
    job = yaml.safe_load(MANIFEST.read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["apiVersion"], job["kind"], spec["completionMode"]) == ("batch/v1", "Job", "Indexed")
    assert pod["restartPolicy"] == "Never", "podFailurePolicy is refused without"
    named = {
        rule["onExitCodes"]["containerName"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    }
    assert named == {container["name"]}
    assert [
        rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        if 75 in rule.get("onExitCodes", {}).get("values", [])
    ] == ["Ignore"]

    program, *words = [word.replace("$(JOB_NAME)", "gpt") for word in container["command"]]
    assert program == "resilient"
    flags = accepted(*words, POD_IP="10.0.0.7")
    assert (flags["--nnodes"], flags["--local-addr"], flags["--rdzv-id"]) == ("2:4", "10.0.0.7", "gpt")
    assert int(flags["--nnodes"].partition(":")[2]) == spec["completions"] == spec["parallelism"]
    assert int(flags["--shutdown-timeout"]) < pod["terminationGracePeriodSeconds"]
    assert {each["name"] for each in container["env"]} == {"JOB_NAME", "POD_IP"}
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
