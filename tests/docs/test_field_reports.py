"""docs/field-reports.md and the tests that carry the marker ``field_report`` say the same, in both directions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/field-reports.md"
ROW = re.compile(r"^\| (BR-\d+) \| (.+) \| (.+) \| (.*) ?\|$", re.MULTILINE)


def marked() -> Iterator[tuple[str, str]]:
    """Yield each number with each test that carries it."""
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                if ast.unparse(decorator).startswith("pytest.mark.field_report("):
                    assert isinstance(decorator, ast.Call)
                    for number in decorator.args:
                        yield ast.literal_eval(number), f"{path.relative_to(ROOT)}::{node.name}"


def test_every_report_has_its_tests_and_every_marked_test_its_report() -> None:
    rows = ROW.findall(PAGE.read_text())
    told = {(number, test) for number, _, _, tests in rows for test in re.findall(r"`([^`]+)`", tests)}
    assert told == set(marked())
    assert len({number for number, *_ in rows}) == len(rows), "a report is told twice"


def test_a_report_without_a_test_says_why() -> None:
    for number, source, text, tests in ROW.findall(PAGE.read_text()):
        assert re.search(r"#\d+", source), f"{number} names no public report"
        says_why = re.match(r"\*\*(Later|Does not apply)\*\*: \w", text) is not None
        assert says_why != bool(tests.strip()), number
