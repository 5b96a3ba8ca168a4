"""The account as JSON: names that stay, and numbers only."""

from __future__ import annotations

import json

import pytest

from resilient.report.document import as_json
from resilient.report.model import Part
from tests.report import ledgers

NAMES = (
    *("run", "run_id", "began", "as_of", "began_s", "as_of_s", "wall_s", "ettr", "step", "state", "parts"),
    *("generations", "incidents", "saves", "restores", "pictures", "machines", "stakes", "notes", "ettr_hours"),
    *("bottleneck", "promise", "advice", "missing"),
)


@pytest.mark.parametrize("kind", ["rich", "empty", "calm", "running", "hostile"])
def test_it_is_json_with_all_names(kind: str) -> None:
    told = json.loads(json.dumps(as_json(getattr(ledgers, kind)()), allow_nan=False))
    assert tuple(told) == NAMES
    assert sum(told["parts"].values()) == pytest.approx(told["wall_s"], rel=0.01)
    assert list(told["parts"]) == [str(part) for part in Part]


def test_an_incident_has_what_it_cost_and_whose_it_was() -> None:
    told = as_json(ledgers.rich())
    last = told["incidents"][-1]
    assert (last["failure"], last["owner"], last["rank"], last["node"]) == ("node-lost", "platform", 4, "node-b")
    assert last["cost_s"] == pytest.approx(213.5)
    assert last["parts"]["lost work"] == 120
    assert last["sources"] == [{"source": "s3://bucket/runs/gpt-13b", "nbytes": 37 << 30}]
    assert told["began"] == "2026-12-01T12:30:00.000Z"
    power = told["machines"][0]["values"]["power_w"]
    assert power["samples"] == 15_000 - 200
    assert 1000 < power["min"] < power["mean"] < power["max"] < 3000
