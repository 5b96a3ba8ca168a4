"""Every released format is read, for ever: checkpoints that earlier versions wrote."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import resilient
from resilient.format.version import FORMAT
from tests.compat.make_golden import VALUES, arrays, bits, state, trained

GOLDEN = sorted(Path(__file__).parent.glob("v*/run"))


@pytest.fixture(params=GOLDEN, ids=lambda path: path.parent.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a copy of a golden run: a reader may leave marks."""
    shutil.copytree(request.param, tmp_path / "run")
    return str(tmp_path / "run")


def test_there_is_a_golden_run_of_every_format() -> None:
    assert [path.parent.name for path in GOLDEN] == [f"v{number}" for number in range(1, FORMAT + 1)]


def test_its_line_is_read(golden: str) -> None:
    found = resilient.checkpoints(golden)
    assert [each.step for each in found] == [15, 10]
    assert all(each.world_size == 1 and set(each.items) >= {"model", "optimizer", "arrays", "values"} for each in found)


@pytest.mark.parametrize("step", [10, 15])
def test_every_bit_comes_back(golden: str, step: int) -> None:
    model, optimizer = trained(0)
    into = {name: torch.zeros_like(tensor) for name, tensor in arrays(step).items()}
    values = dict.fromkeys([*VALUES, "step"])
    resilient.load(golden, {"model": model, "optimizer": optimizer, "arrays": into, "values": values}, step=step)
    wanted_model, wanted_optimizer = trained(step)
    assert model.encoder.weight is model.decoder.weight
    for (name, got), wanted in zip(model.state_dict().items(), wanted_model.state_dict().values(), strict=True):
        assert torch.equal(got, wanted), name
    for got, wanted in zip(model.parameters(), wanted_model.parameters(), strict=True):
        assert torch.equal(optimizer.state[got]["momentum_buffer"], wanted_optimizer.state[wanted]["momentum_buffer"])
    for name, wanted in arrays(step).items():
        assert bits(into[name]) == bits(wanted), name
    assert values == state(step)["values"]


def test_the_command_line_reads_it(golden: str) -> None:
    command = [str(Path(sys.executable).with_name("resilient")), "verify", golden, "--deep", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(done.stdout)["ok"] is True, done.stderr
