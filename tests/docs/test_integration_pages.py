"""The example programs of docs/integrations run, and the commands of the pages know what they made."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "integrations").glob("dcp.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_example_runs(page: Path, tmp_path: Path) -> None:
    (code,) = re.findall(r"<!-- run: dcp -->\n```python\n(.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "program.py").write_text(code)
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, check=True, timeout=120)
    resilient = str(Path(sys.executable).with_name("resilient"))
    said = subprocess.run([resilient, "show", "dcp-run@100"], cwd=tmp_path, check=True, timeout=60, capture_output=True)
    assert b"weight" in said.stdout
