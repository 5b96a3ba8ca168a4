"""docs/observability.md: its observers run, and its settings are there."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from resilient import events
from resilient.config import Settings

PAGE = (Path(__file__).parents[2] / "docs" / "observability.md").read_text()
BLOCKS: dict[str, str] = dict(re.findall(r"<!-- run: (\S+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))

TOLD = (
    events.SaveStarted(step=10, reason="interval", nbytes=9, stall_s=0.5),
    events.SaveCommitted(step=10, nbytes=9, duration_s=2.0),
    events.SaveFailed(step=20, error="disk full"),
    events.StepsTaken(step=20, steps=10, turn_s=1.0, data_s=0.0, save_s=0.0),
    events.StepPicture(
        step=20, steps=3, step_s=0.1, compute_s=0.06, exchange_s=0.02, data_s=0.0, optimizer_s=0.02, save_s=0.0
    ),
)


def run(block: str, observer: str) -> None:
    names: dict[str, Any] = {}
    exec(block, names)  # the page is ours
    for event in TOLD:
        names[observer](event)


def test_every_python_block_is_run() -> None:
    assert set(BLOCKS) == {"opentelemetry", "tensorboard"}
    assert PAGE.count("```python") == len(BLOCKS)


def test_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    run(BLOCKS["opentelemetry"], "to_opentelemetry")
    data = reader.get_metrics_data()
    assert data is not None
    (resource,) = data.resource_metrics
    found: dict[str, list[Any]] = {
        each.name: list(each.data.data_points) for scope in resource.scope_metrics for each in scope.metrics
    }
    provider.shutdown()
    assert [point.value for point in found["resilient.steps"]] == [10]
    assert [point.sum for point in found["resilient.save.stall"]] == [0.5]
    outcomes = {point.attributes["outcome"]: point.value for point in found["resilient.saves"]}
    assert outcomes == {"committed": 1, "failed": 1}


def test_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for its writer: the package is larger than all that these tests need together."""
    written: list[tuple[object, ...]] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == "tensorboard"

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            written.append((tag, value, step))

        def add_scalars(self, tag: str, values: dict[str, float], step: int) -> None:
            written.append((tag, values, step))

    module = types.ModuleType("torch.utils.tensorboard")
    vars(module)["SummaryWriter"] = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    run(BLOCKS["tensorboard"], "to_tensorboard")
    assert written == [
        ("save/stall_s", 0.5, 10),
        ("save/commit_s", 2.0, 10),
        ("step", {"compute": 0.06, "exchange": 0.02}, 20),
    ]


def test_the_settings_are_there_with_these_defaults() -> None:
    told = re.findall(r"^\| `(\w+)` \| .*(?:`None` \(the default\)|none by default)", PAGE, re.MULTILINE)
    assert told == ["metrics_port", "metrics_file", "observers"]
    defaults = {each.name: each.default for each in fields(Settings)}
    assert [defaults[name] for name in told] == [None, None, ()]


def test_the_command_of_the_page_prints_the_path_of_the_dashboard() -> None:
    (command,) = re.findall(r'^python -c "(.*)"$', PAGE, re.MULTILINE)
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert Path(done.stdout.strip()).read_text().startswith("{")
