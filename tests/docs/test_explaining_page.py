"""docs/explaining.md has the classes, their owners and their ladders as they are, and rules that can be used."""

from __future__ import annotations

import re
from pathlib import Path

from resilient.policy.failures.classes import ABOUT
from resilient.policy.failures.reading import parse_rules

PAGE = (Path(__file__).parents[2] / "docs/explaining.md").read_text()


def test_the_table_of_classes_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (user|platform|either) \| ([a-z, -]+) \|$", PAGE, re.MULTILINE)
    assert rows == [(str(each), str(about.owner), ", ".join(about.ladder)) for each, about in ABOUT.items()]


def test_the_example_of_a_rule_is_one() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (rule,) = parse_rules(text)
    assert rule.source == "the handbook of mydriver"
