"""The command line as a process: what it imports, how fast it is, what it writes where."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resilient.format.documents import Commit, decode_document, encode_document
from resilient.store.local import LocalStore
from tests.catalog.runs import attempt_of, new_generation, save


def start(*arguments: object, flags: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-m", "resilient.cli.main", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment}
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("cli") / "run"
    store = LocalStore(place)
    claim = new_generation(store)
    for step in (1, 2):
        save(store, claim, step)
    return place


def test_the_catalog_side_never_imports_torch_and_imports_clients_only_when_needed(run: Path, tmp_path: Path) -> None:
    commands: list[tuple[object, ...]] = [
        ("ls", run),
        ("show", run),
        ("verify", run, "--deep"),
        ("restore", run, tmp_path / "copy"),
        ("restore", run, tmp_path / "st", "--format", "safetensors"),
        ("prune", run, "--keep-last", "5", "--yes"),
        ("pin", f"{run}@1"),
        ("mark", "good", f"{run}@1", "--why", "looked at"),
        ("fsck", run, "--deep"),
        ("--version",),
        ("--help",),
    ]
    for command in commands:
        done = start(*command, flags=("-X", "importtime"))
        assert done.returncode == 0, done.stderr[-2000:]
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
        unwanted = {
            name for name in imported if name.partition(".")[0] in {"torch", "fsspec", "s3fs", "botocore", "rich"}
        }
        assert not unwanted, f"{command[0]} imports {sorted(unwanted)[:5]}"


@pytest.mark.field_report("BR-221")
def test_results_go_to_stdout_and_progress_to_stderr_without_color(run: Path) -> None:
    done = start("verify", run, "--deep", "--json")
    assert done.stdout.startswith("{")
    assert "verified: 100 %" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    failed = start("ls", run / "nothing")
    assert failed.returncode == 10
    assert failed.stdout == ""
    assert failed.stderr.startswith("error: ")
    assert "Traceback" not in failed.stderr


def test_ls_of_1000_committed_steps_is_quick(tmp_path: Path) -> None:
    """Under a second on an idle machine; what is asserted here leaves room for a busy one."""
    store = LocalStore(tmp_path / "run")
    claim = new_generation(store)
    save(store, claim, 1, world_size=1)
    first = attempt_of(claim, 1)

    commit: Commit = decode_document(Commit, store.get(first.commit), "it")
    for step in range(2, 1001):
        attempt = attempt_of(claim, step)
        folder = tmp_path / "run" / attempt.prefix
        shutil.copytree(tmp_path / "run" / first.prefix, folder)
        fields = {name: getattr(commit, name) for name in commit.__slots__} | {"step": step}
        (folder / "COMMIT").write_bytes(encode_document(Commit(**fields)))
    took = []
    for _ in range(2):
        started_s = time.monotonic()
        done = start("ls", tmp_path / "run")
        took.append(time.monotonic() - started_s)
        assert len(done.stdout.splitlines()) == 1001, done.stderr
    assert min(took) < 3, took


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
@pytest.mark.parametrize("options", [("--json",), ()])
@pytest.mark.parametrize("exists", [True, False])
def test_an_output_that_takes_nothing_is_said_in_one_line(run: Path, options: tuple[str, ...], *, exists: bool) -> None:
    place = run if exists else run / "nothing"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "resilient.cli.main", "ls", str(place), *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    lines = [line for line in done.stderr.splitlines() if not line.startswith("hint: ")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert done.returncode == (13 if exists else 10)
