"""A save that nobody waited for is committed all the same: a program may end right after it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import resilient

PROGRAM = """
import sys, time, torch, resilient
from concurrent.futures import ThreadPoolExecutor
from resilient.store.local import LocalStore

class Busy(LocalStore):
    "Uses an executor for each object, as the clients of object stores do."
    def put(self, key, parts):
        time.sleep(0.5)  # by now the main thread has ended
        with ThreadPoolExecutor(1) as pool:
            pool.submit(super().put, key, parts).result()

resilient.save(Busy(sys.argv[1]), 1, {"model": {"w": torch.zeros(1000)}})
"""


@pytest.mark.field_report("BR-045", "BR-177")
def test_a_program_that_ends_right_after_a_save_has_saved(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, place], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [found.step for found in resilient.checkpoints(place)] == [1]


LOSING = """
import sys, torch, resilient
from pathlib import Path

place = Path(sys.argv[1])
resilient.save(place, 1, {"model": {"w": torch.zeros(1000)}}).wait(60)
(place / "data").rename(place / "elsewhere")
(place / "data").touch()  # a file is in the way of what the next save writes
resilient.save(place, 2, {"model": {"w": torch.ones(1000)}})
"""


@pytest.mark.field_report("BR-177")
def test_a_save_that_is_lost_at_the_end_of_a_program_is_told_with_its_step(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOSING, str(tmp_path / "run")], capture_output=True, text=True, timeout=120, check=False
    )
    assert "the save of step 2 failed" in done.stderr
    assert "Not a directory" in done.stderr
    assert "Traceback" not in done.stderr
