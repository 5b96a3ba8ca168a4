"""The code blocks of docs/testing.md are suites that pass, and its tables name what there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import resilient.testing
from resilient.testing import Mode

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
BLOCKS = re.findall(r"<!-- run: (\S+) -->\n```python\n(.*?)```", PAGE, re.DOTALL)


def test_every_block_is_run() -> None:
    assert len(BLOCKS) == PAGE.count("```python") >= 4


def test_the_blocks_are_suites_that_pass(tmp_path: Path) -> None:
    for name, code in BLOCKS:
        (tmp_path / name).write_text(code)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RESILIENT_", "PYTEST_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "t"), "."]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=220, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert "failed" not in done.stdout


def test_every_mode_and_every_name_is_on_the_page() -> None:
    for mode in Mode:
        assert f"`{mode.name}`" in PAGE
    for name in re.findall(r"from resilient\.testing import (.*)", PAGE):
        assert {each.strip() for each in name.split(",")} <= set(resilient.testing.__all__)
