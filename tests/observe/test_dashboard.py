"""The dashboard shows every metric, and nothing that does not exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from resilient.observe.names import COMMON, METRICS, Kind

DASHBOARD: dict[str, Any] = json.loads((files("resilient.observe") / "dashboards" / "grafana.json").read_text())
PAGE = (Path(__file__).parents[2] / "docs" / "observability.md").read_text()

NOT_SHOWN: frozenset[str] = frozenset()
"""Documented metrics that are on purpose not on the dashboard."""

SERIES = {
    metric.name + end: {*COMMON, *metric.labels, *(["le"] if end == "_bucket" else [])}
    for metric in METRICS
    for end in (("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",))
}
COUNTERS = {metric.name for metric in METRICS if metric.kind is Kind.COUNTER}

TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?![\w.]))|(?P<name>[a-zA-Z_][\w:]*)|(?P<text>\"[^\"]*\")"
    r"|(?P<range>\[\$?\w+(?::\w*)?\])|(?P<mark>=~|!~|!=|>=|<=|==|[-+*/=<>(){},]))"
)
OF_RANGES = {"rate", "increase", "changes", "last_over_time"}
FUNCTIONS = OF_RANGES | {"histogram_quantile"}
AGGREGATIONS = {"sum", "avg", "max", "min", "count", "topk"}


class Reader:
    """Reads the part of PromQL that is used here: operands with operators between them."""

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        self.at = 0
        self.series: list[tuple[str, set[str], str]] = []  # name, labels that are asked for, function around it
        position = 0
        while position < len(text.rstrip()):
            match = TOKEN.match(text, position)
            assert match is not None, f"no PromQL at {text[position:]!r}"
            assert match.lastgroup is not None
            self.tokens.append((match.lastgroup, match[match.lastgroup]))
            position = match.end()
        self.expression("", set())
        assert self.at == len(self.tokens), f"left over: {self.tokens[self.at :]}"

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")

    def take(self, *expected: str) -> str:
        kind, text = self.peek()
        assert not expected or text in expected or kind in expected, f"{text!r} where {expected} belongs"
        self.at += 1
        return text

    def expression(self, function: str, grouped: set[str]) -> None:
        self.operand(function, grouped)
        while self.peek()[1] in {"+", "-", "*", "/", ">", "<", "=="}:
            self.take()
            self.operand(function, grouped)

    def operand(self, function: str, grouped: set[str]) -> None:
        kind, text = self.peek()
        if kind == "number":
            self.take()
        elif text == "(":
            self.take()
            self.expression(function, grouped)
            self.take(")")
        elif text in AGGREGATIONS:
            self.take()
            by = self.labels() if self.peek()[1] == "by" else set()
            self.arguments(function, grouped | by)
        elif text in FUNCTIONS:
            self.take()
            self.arguments(text, grouped)
        else:
            self.selector(function, grouped)
        if self.peek()[0] == "range" and ":" in self.peek()[1]:
            self.take()  # a subquery

    def labels(self) -> set[str]:
        self.take("by")
        self.take("(")
        found = {self.take("name")}
        while self.peek()[1] == ",":
            self.take()
            found.add(self.take("name"))
        self.take(")")
        return found

    def arguments(self, function: str, grouped: set[str]) -> None:
        self.take("(")
        self.expression(function, grouped)
        while self.peek()[1] == ",":
            self.take()
            self.expression(function, grouped)
        self.take(")")

    def selector(self, function: str, grouped: set[str]) -> None:
        name, labels = self.take("name"), set(grouped)
        if self.peek()[1] == "{":
            self.take()
            while self.peek()[1] != "}":
                labels.add(self.take("name"))
                self.take("=", "!=", "=~", "!~")
                self.take("text")
                if self.peek()[1] == ",":
                    self.take()
            self.take("}")
        ranged = self.peek()[0] == "range"
        if ranged:
            self.take()
        assert ranged or function not in OF_RANGES or self.peek()[0] != "range"
        self.series.append((name, labels, function if ranged else ""))


def panels() -> Iterator[dict[str, Any]]:
    yield from (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def expressions() -> list[str]:
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [*shown, *(each["expr"] for each in DASHBOARD["annotations"]["list"] if "expr" in each)]


def check(expression: str) -> list[str]:
    """Return the metrics of an expression, having checked their names, labels, and that counters are seen as rates."""
    series = Reader(expression).series
    assert series
    for name, labels, function in series:
        assert name in SERIES, name
        assert labels <= SERIES[name], f"{name} has no {labels - SERIES[name]}"
        if name in COUNTERS or name.endswith("_bucket"):
            assert function in OF_RANGES, f"{name} is a counter"
    return [re.sub(r"_(bucket|sum|count)$", "", name) for name, _, _ in series]


def test_every_metric_is_shown_and_nothing_else() -> None:
    shown = {name for expression in expressions() for name in check(expression)}
    assert shown | NOT_SHOWN == {metric.name for metric in METRICS}
    assert not shown & NOT_SHOWN


def test_every_expression_is_of_the_run_that_was_chosen() -> None:
    for expression in expressions():
        assert expression.count("resilient_") == expression.count('run="$run"'), expression


def test_legends_have_labels_that_are_there() -> None:
    for panel in panels():
        for target in panel["targets"]:
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert wanted <= {*COMMON, *(label for _, labels, _ in Reader(target["expr"]).series for label in labels)}
            assert target["legendFormat"]


def test_the_examples_of_the_page_are_promql_of_these_metrics() -> None:
    blocks = re.findall(r"```promql\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 2
    for line in "".join(blocks).splitlines():
        check(line)


@pytest.mark.parametrize(
    "wrong",
    [
        "max(resilient_stepp)",
        'max(resilient_step{run="x"',
        "sum by (outcom) (rate(resilient_saves_total[5m]))",
        "sum(resilient_saves_total)",
        'max(resilient_step{ranks="0"})',
        "sum(rate(resilient_steps_total[5m]) / )",
    ],
)
def test_a_mistake_is_found(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check(wrong)


def test_it_is_a_dashboard_that_grafana_imports() -> None:
    assert DASHBOARD["schemaVersion"] >= 41  # Grafana 12
    assert DASHBOARD["id"] is None
    source, run = DASHBOARD["templating"]["list"]
    assert (source["type"], source["query"], source["name"]) == ("datasource", "prometheus", "datasource")
    assert run["definition"] == run["query"]["query"] == "label_values(resilient_step, run)"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Health", "Productive time", "Saves and restores", "Failures", "Step picture"]


def test_panels_do_not_overlap() -> None:
    taken = set[tuple[int, int]]()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
