"""Figures of a proof survive an interrupted run and reach the page."""

from __future__ import annotations

from pathlib import Path

from tests.figures import Figures
from tests.proof_report import render


def test_an_interrupted_proof_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "kills.jsonl"
    Figures(path, "Kills").add(step=3, equal=True)
    with path.open("a") as file:
        file.write('{"step": 4, "eq')  # killed while writing
    again = Figures(path, "Kills")
    assert list(again) == [{"step": 3, "equal": True}]
    again.add(step=5, equal=True)
    assert len(Figures(path, "Kills")) == 2


def test_the_page_says_counts_and_extremes(tmp_path: Path) -> None:
    figures = Figures(tmp_path / "kills.jsonl", "Kills over the phases of a save")
    for step in (3, 9, 6):
        figures.add(step=step, phase="commit" if step == 9 else "data")
    page = render(tmp_path)
    assert "## Kills over the phases of a save\n\n`kills`, 3 rounds; 20" in page
    assert "| step | min 3, median 6, max 9 |" in page
    assert "| phase | data: 2, commit: 1 |" in page


def test_what_was_not_run_this_time_stays_on_the_page(tmp_path: Path) -> None:
    Figures(tmp_path / "one" / "kills.jsonl", "Kills").add(step=3)
    Figures(tmp_path / "one" / "bytes.jsonl", "Bytes").add(step=4)
    Figures(tmp_path / "two" / "kills.jsonl", "Kills").add(step=7)
    before = render(tmp_path / "one")
    page = render(tmp_path / "two", before)
    assert "| step | 4 |" in page
    assert "| step | 7 |" in page
    assert "| step | 3 |" not in page
    assert page.count("## ") == 2
    assert render(tmp_path / "none", page) == page
