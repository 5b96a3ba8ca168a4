"""Names that others build on: kinds of events with their fields, and metrics with their labels, only ever get more."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from resilient import events
from resilient.observe.names import METRICS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "observability.md").read_text()
KINDS = [each for each in vars(events).values() if isinstance(each, type) and issubclass(each, events.Event)]


def promised(name: str) -> list[str]:
    return (Path(__file__).parent / name).read_text().splitlines()


def table(page: str, first_cell: str) -> list[list[str]]:
    lines = page.partition(f"\n| {first_cell} |")[2].splitlines()[2:]
    rows = lines[: next((number for number, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))] for row in rows]


def compare(now: list[str], name: str) -> None:
    gone = set(promised(name)) - set(now)
    assert not gone, f"promised, and not there any more (or of another type): {sorted(gone)}"
    new = [line for line in now if line not in promised(name)]
    assert not new, f"new: promise them in tests/observe/{name} and describe them in docs/: {new}"


def test_no_event_or_field_is_taken_away() -> None:
    now = [f"{kind.__name__}.{each.name}: {each.type}" for kind in KINDS for each in fields(kind)]
    compare([line for line in now if not line.startswith("Event.")], "events.txt")


def test_no_metric_or_label_is_taken_away() -> None:
    compare([" ".join((each.kind, each.name, *each.labels)) for each in METRICS], "metrics.txt")


def test_every_event_is_described_with_its_fields() -> None:
    page = (ROOT / "docs" / "events.md").read_text()
    rows = {row[0].strip("`"): row for row in table(page, "event")}
    assert set(rows) == {kind.__name__ for kind in KINDS} - {"Event"}
    for kind in KINDS[1:]:
        described = [each.strip("`") for each in rows[kind.__name__][1].split(", ")]
        assert described == [each.name for each in fields(kind) if each.name != "rank"], kind.__name__
        assert rows[kind.__name__][2]


def test_every_metric_is_described_as_a_scrape_describes_it() -> None:
    rows = table(PAGE, "metric")
    described = [(row[0].strip("`"), row[1], tuple(re.findall(r"`(\w+)`", row[2])), row[3]) for row in rows]
    assert described == [(each.name, str(each.kind), each.labels, each.about) for each in METRICS]
