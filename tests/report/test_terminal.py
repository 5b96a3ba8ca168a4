"""The report on a terminal: it fits, says what matters first, and obeys nothing that a run has written."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from resilient.report.model import Part
from resilient.report.terminal import bar, summary
from tests.report import ledgers


def shown(kind: str, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(summary(getattr(ledgers, kind)()))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("kind", ["rich", "empty", "calm", "running", "hostile"])
def test_it_fits(kind: str, width: int) -> None:
    assert max(map(len, shown(kind, width).splitlines())) <= width


def test_the_first_lines_are_the_state_and_the_share_of_productive_time() -> None:
    lines = shown("rich", 160).splitlines()
    assert lines[0] == "gpt-13b is training: step 10,000, in generation 7, on 4 ranks (1 host)."
    assert lines[3].startswith("88.4 % of 3 h was productive (ETTR 0.884); promise missed: 86.5 % delivered")


def test_each_failure_says_when_what_where_whose_and_what_it_cost() -> None:
    text = shown("rich", 160)
    (last,) = (" ".join(one.split()) for one in text.splitlines() if "15:09:06Z" in one)
    assert last == "6 2026-12-01 15:09:06Z node-lost rank 4 on node-b platform (likely) cost 3 min 34 s"
    assert "lost work 2 min, detection 54 s, start-up 29 s, re-formation 6 s, restore 4.5 s" in text
    assert "back at step 8,399, read from s3://bucket/runs/gpt-13b (37.0 GiB); started again without the node" in text


def test_nothing_of_a_run_is_obeyed() -> None:
    text = shown("hostile")
    assert "\\u001b" in text
    assert not set(text) & {"\x1b", "\x00", "\u202e"}


def test_the_bar_shows_shares_also_without_color() -> None:
    drawn = bar({Part.COMPUTE: 50.0, Part.EXCHANGE: 25.0, Part.LOST: 25.0}, width=40).plain
    assert drawn == "█" * 30 + "▒" * 10
