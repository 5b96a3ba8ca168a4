"""The plugin in a suite of somebody else's: found by itself, and in nobody's way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = """
import sys

import pytest


def test_nothing_was_imported_for_it():
    assert "resilient.testing.plugin" in sys.modules
    assert "torch" not in sys.modules
    assert not [name for name in sys.modules if name.startswith("resilient.store")]


def test_seed(resilient_seed):
    assert resilient_seed == EXPECTED


@pytest.mark.resilient_seed(7)
def test_fixed_seed(resilient_seed):
    assert resilient_seed == 7


def test_fixtures(memory_store, faulty_store, process_faults):
    from resilient.testing import Fault, Mode

    store = faulty_store(Fault(mode=Mode.LOSE_RESPONSE, verbs=frozenset({"put"})), inner=memory_store)
    with pytest.raises(OSError):
        store.put("key", [b"x"])
    assert memory_store.get("key") == b"x"
    assert store.fired == 1
    assert not faulty_store().operations
    assert not process_faults.kill(PID)


class TestOwn:
    @pytest.fixture
    def memory_store(self):
        return "mine"

    def test_a_fixture_of_that_name_stays_theirs(self, memory_store):
        assert memory_store == "mine"
"""


def run(folder: Path, suite: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_theirs.py").write_text(suite)
    (folder / "pytest.ini").write_text("[pytest]\nstrict_markers = true\nfilterwarnings = error\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def ended() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_a_suite_finds_it_and_a_failure_says_how_to_repeat_it(tmp_path: Path, ended: int) -> None:
    suite = SUITE.replace("PID", str(ended)).replace("EXPECTED", "-1")
    first = run(tmp_path, suite)
    assert re.search(r"1 failed, 4 passed", first.stdout), first.stdout + first.stderr
    shown = re.search(r"^resilient: --resilient-seed (\d+)$", first.stdout, re.MULTILINE)
    told = re.search(r"^seed (\d+) \(call\); again with --resilient-seed (\d+)$", first.stdout, re.MULTILINE)
    assert shown
    assert told
    assert told[2] == shown[1]
    assert first.stdout.count("again with") == 1, "only what failed and asked for a seed tells it"

    again = run(tmp_path, suite.replace("== -1", f"== {told[1]}"), "--resilient-seed", told[2])
    assert "5 passed" in again.stdout, again.stdout


def test_the_processes_of_xdist_have_the_same_seed(tmp_path: Path) -> None:
    suite = """
import pytest

@pytest.mark.parametrize("index", range(4))
def test_seed(index, pytestconfig):
    print("drawn", pytestconfig.getoption("resilient_seed"))
    assert index < 0
"""
    drawn = re.findall(r"^drawn (\d+)$", run(tmp_path, suite, "-n2").stdout, re.MULTILINE)
    assert len(drawn) == 4
    assert len(set(drawn)) == 1
