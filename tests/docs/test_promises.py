"""docs/promises.md has every promise, in order, with a state and, unless it is for later, a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/promises.md").read_text()


def test_every_promise_has_a_state_and_a_test() -> None:
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    assert [section.split()[0] for section in sections] == [f"G{number}" for number in range(1, 16)]
    for section in sections:
        state = re.search(r"^\*\*(Held|Partly|Later)", section, re.MULTILINE)
        assert state, section
        assert state[1] == "Later" or "::test_" in section, section
