"""docs/report.md has the parts of the time as they are, and the names that are printed."""

from __future__ import annotations

import re
from pathlib import Path

from resilient.report.document import as_json
from resilient.report.model import PRODUCTIVE, Part
from resilient.report.words import MEANING
from tests.report import ledgers

PAGE = (Path(__file__).parents[2] / "docs/report.md").read_text()


def test_the_table_of_parts_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `([a-z -]+)` \| ([^|]+) \| (productive|not productive) \|$", PAGE, re.MULTILINE)
    assert rows == [
        (str(part), MEANING[part], "productive" if part in PRODUCTIVE else "not productive") for part in Part
    ]


def test_all_names_that_are_printed_are_documented() -> None:
    told = as_json(ledgers.rich())
    named = set(re.findall(r"`(\w+)`", PAGE.partition("## JSON")[2].partition("## Watching")[0]))
    assert set(told) <= named
    assert set(told["incidents"][0]) - named <= {"generation"}
    assert set(told["stakes"][0]) <= named
