"""docs/elastic.md: its program runs, on one rank and on two, and counts what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from resilient.cli.main import main
from resilient.run.sampler import ElasticSampler

PAGE = (Path(__file__).parents[2] / "docs" / "elastic.md").read_text()


def test_the_example_runs_and_continues_on_another_size(tmp_path: Path) -> None:
    (code,) = re.findall(r"<!-- run: micro-batches -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for launcher, total in (([], 40), (torchrun, 60)):
        (tmp_path / "program.py").write_text(code.replace("total=40", f"total={total}"))
        done = subprocess.run(
            [sys.executable, *launcher, "program.py"],
            cwd=tmp_path,
            timeout=180,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert "resumed at step 40" in done.stderr
    assert "now at step 60" in done.stderr


def test_so_many_micro_batches_make_a_step() -> None:
    told = "6 on one rank here, 3 on two, 2 on three or four, 1 on six"
    assert told in PAGE
    samplers = [ElasticSampler(960, 24, 0, micro_batch=4, rank=0, world_size=size) for size in (1, 2, 3, 4, 6)]
    assert [sampler.accumulation for sampler in samplers] == [6, 3, 2, 2, 1]


def test_the_options_are_there() -> None:
    shown = CliRunner().invoke(main, ["run", "--help"]).output
    told = re.findall(r"^\| `(--[a-z-]+)", PAGE, re.MULTILINE)
    assert len(told) >= 5
    assert all(option in shown for option in told)
