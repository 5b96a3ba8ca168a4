"""Ten questions about five runs of known truth, answered from what a reader of the page can see."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser

from resilient.report.model import (
    End,
    GenerationTime,
    Incident,
    Ledger,
    Part,
    Promise,
    RestoreTime,
    SaveTime,
    Stake,
)
from resilient.report.page import render

QUESTIONS: Final = (
    "What failed?",
    "When?",
    "On which rank?",
    "Whose fault was it?",
    "What did it cost?",
    "From where did it come back?",
    "What would be lost now?",
    "How much time was productive?",
    "What took most of the rest?",
    "What should be changed?",
)
BEGAN_S: Final = 1_796_137_200.0  # 2026-12-01 15:00:00 UTC
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run, and what is true of it: for each question the words that an answer must have, in any order.

    Names of runs are about nothing, so that people who are asked cannot guess from them.
    """

    name: str
    ledger: Ledger
    truth: tuple[tuple[str, ...], ...]


def life(
    number: int, began: float, ended: float, resumed: int | None, last: int, kept: int | None, end: End, **parts: float
) -> GenerationTime:
    return GenerationTime(
        generation=number, nonce=f"{number:032x}", world_size=4, hosts=("n1", "n2"), began_s=BEGAN_S + began,
        ended_s=BEGAN_S + ended, resumed_step=resumed, last_step=last, kept_step=kept, end=end,
        parts={Part[name]: seconds for name, seconds in parts.items()},
    )  # fmt: skip


def run(
    name: str,
    lives: tuple[GenerationTime, ...],
    incidents: tuple[Incident, ...],
    stakes: tuple[Stake, ...],
    *,
    idle_s: float = 0.0,
    promise: Promise | None = None,
) -> Ledger:
    total: dict[Part, float] = {Part.IDLE: idle_s} if idle_s else {}
    for one in lives:
        for part, seconds in one.parts.items():
            total[part] = total.get(part, 0.0) + seconds
    saves = tuple(
        SaveTime(
            at_s=BEGAN_S + at,
            generation=1,
            step=at // 2,
            reason="every",
            nbytes=GIB,
            stall_s=0.1,
            persist_s=3.0,
            commit_s=3.2,
        )
        for at in range(300, 3300, 300)
    )
    restores = tuple(
        RestoreTime(
            at_s=one.at_s + 60,
            generation=one.generation + 1,
            step=one.resumed_step,
            nbytes=GIB,
            duration_s=4.0,
            sources=one.sources,
        )
        for one in incidents
        if one.resumed_step is not None
    )
    return Ledger(
        url=f"s3://lab/runs/{name}", run_id="5" * 32, began_s=BEGAN_S, as_of_s=BEGAN_S + sum(total.values()),
        step=lives[-1].last_step, parts=total, generations=lives, incidents=incidents, saves=saves, restores=restores,
        stakes=stakes, promise=promise,
    )  # fmt: skip


def incident(
    at: float,
    generation: int,
    failure: str,
    rank: int | None,
    node: str | None,
    *,
    last: int,
    resumed: int | None,
    sources: tuple[tuple[str, int], ...] = (),
    confidence: str = "certain",
    action: str = "restart",
    **parts: float,
) -> Incident:
    return Incident(
        at_s=BEGAN_S + at, generation=generation, failure=failure, confidence=confidence, rank=rank, node=node,
        why="as the proof says", proof=("a line",), action=action, because="the first in a row", last_step=last,
        resumed_step=resumed, lost_steps=last - (resumed or 0) if resumed is not None else last,
        parts={Part[name]: seconds for name, seconds in parts.items()}, sources=sources,
    )  # fmt: skip


CASES: Final = (
    Case(
        name="amber",
        ledger=run(
            "amber",
            (
                life(
                    1, 0, 1800, None, 850, 800, End.FAILED, START=30, COMPUTE=1500, EXCHANGE=155, LOST=100, DETECTION=15
                ),
                life(2, 1800, 3600, 800, 1660, None, End.RUNNING, REFORMATION=20, RESTORE=40, START=25, COMPUTE=1715),
            ),
            (
                incident(
                    1785,
                    1,
                    "device-hardware",
                    3,
                    "n2",
                    last=850,
                    resumed=800,
                    sources=(("memory", 3 * GIB),),
                    action="exclude-node",
                    LOST=100,
                    DETECTION=15,
                    REFORMATION=20,
                    RESTORE=40,
                    START=25,
                ),
            ),
            (
                Stake(what="a process", step=1655, source="memory", lost_s=10),
                Stake(what="the job", step=1600, source="store", lost_s=125),
            ),
        ),
        truth=(
            ("device-hardware", "accelerator", "once"),
            ("2026-12-01 15:29:45 UTC", "step 850"),
            ("rank 3", "n2"),
            ("platform", "certain"),
            ("3 min 20 s", "50 steps"),
            ("step 800", "memory of the node", "3.0 GiB"),
            ("process: 10 s", "1,655", "job: 2 min 5 s", "1,600", "the store"),
            ("93.6 %", "56 min 10 s of 1 h"),
            ("lost work", "1 min 40 s"),
            ("Save more often",),
        ),
    ),
    Case(
        name="birch",
        ledger=run(
            "birch",
            (
                life(1, 0, 1000, None, 400, 390, End.FAILED, START=300, COMPUTE=670, LOST=20, DETECTION=10),
                life(
                    2, 1000, 2000, 390, 700, 650, End.FAILED, START=320, RESTORE=10, COMPUTE=600, LOST=60, DETECTION=10
                ),
                life(3, 2000, 2400, 650, 650, None, End.FAILED, START=330, RESTORE=10, COMPUTE=60),
            ),
            (
                incident(
                    990,
                    1,
                    "network",
                    0,
                    "n1",
                    last=400,
                    resumed=390,
                    sources=(("s3://lab/runs/birch", GIB),),
                    confidence="likely",
                    LOST=20,
                    DETECTION=10,
                    START=320,
                    RESTORE=10,
                ),
                incident(
                    1990,
                    2,
                    "user-error",
                    1,
                    "n1",
                    last=700,
                    resumed=650,
                    sources=(("s3://lab/runs/birch", GIB),),
                    LOST=60,
                    DETECTION=10,
                    START=330,
                    RESTORE=10,
                ),
            ),
            (Stake(what="the job", step=650, source="store", lost_s=0.0),),
        ),
        truth=(
            ("user-error", "error of the program", "2 failures", "network"),
            ("2026-12-01 15:33:10 UTC", "step 700"),
            ("rank 1", "n1"),
            ("the training program", "certain"),
            ("6 min 50 s", "50 steps", "together 12 min 50 s", "60 steps"),
            ("step 650", "s3://lab/runs/birch"),
            ("job: 0 s", "650"),
            ("55.4 %", "22 min 10 s of 40 min"),
            ("start-up", "15 min 50 s"),
            ("mend what the traceback shows",),
        ),
    ),
    Case(
        name="cedar",
        ledger=run(
            "cedar",
            (life(1, 0, 7200, None, 3600, None, End.DONE, START=20, COMPUTE=7100, SAVE=80),),
            (),
            (),
            promise=Promise(promised=0.95, delivered=0.986, largest=Part.SAVE, message=""),
        ),
        truth=(
            ("nothing has failed",),
            ("never",),
            ("nothing has failed",),
            ("nothing has failed",),
            ("nothing",),
            ("nothing has failed",),
            ("nothing", "the run is complete"),
            ("98.6 %", "promise kept", "95.0 %"),
            ("save stall", "1 min 20 s"),
            ("Save less often",),
        ),
    ),
    Case(
        name="ember",
        ledger=run(
            "ember",
            (
                life(1, 0, 1200, None, 500, 500, End.FAILED, START=20, COMPUTE=1160, DETECTION=20),
                life(2, 4800, 6000, 500, 1000, None, End.RUNNING, START=20, RESTORE=20, COMPUTE=1160),
            ),
            (
                incident(
                    1180,
                    1,
                    "node-lost",
                    None,
                    "n2",
                    last=500,
                    resumed=500,
                    sources=(("memory of another node", GIB), ("s3://lab/runs/ember", 3 * GIB)),
                    confidence="possible",
                    action="exclude-node",
                    DETECTION=20,
                    IDLE=3600,
                    START=20,
                    RESTORE=20,
                ),
            ),
            (Stake(what="a node", step=None, source="", lost_s=None),),
            idle_s=3600,
        ),
        truth=(
            ("node-lost", "a node is gone"),
            ("2026-12-01 15:19:40 UTC", "step 500"),
            ("no single rank", "n2"),
            ("platform", "possible"),
            ("1 h 1 min", "0 steps", "idle 1 h"),
            ("step 500", "s3://lab/runs/ember", "75.0 %", "memory of another node", "25.0 %"),
            ("a node: everything",),
            ("38.7 %", "38 min 40 s of 1 h 40 min"),
            ("idle", "1 h"),
            ("started again at once",),
        ),
    ),
    Case(
        name="fjord",
        ledger=run(
            "fjord",
            (life(1, 0, 900, None, 300, None, End.FAILED, START=30, COMPUTE=600, SAVE=10, DETECTION=260),),
            (
                incident(
                    640, 1, "hang", 2, "n1", last=300, resumed=None, confidence="likely", action="stop", DETECTION=260
                ),
            ),
            (Stake(what="the job", step=150, source="store", lost_s=300.0),),
            promise=Promise(promised=0.9, delivered=0.667, largest=Part.DETECTION, message=""),
        ),
        truth=(
            ("hang", "no progress", "once"),
            ("2026-12-01 15:10:40 UTC", "step 300"),
            ("rank 2", "n1"),
            ("not settled", "likely"),
            ("4 min 20 s", "300 steps"),
            ("it has not come back",),
            ("job: 5 min", "150"),
            ("66.7 %", "10 min of 15 min", "promise missed"),
            ("detection", "4 min 20 s"),
            ("look at the stacks",),
        ),
    ),
)


class Lines(HTMLParser):
    """What a reader sees: text, with a new line for each block; nothing of scripts, styles, or attributes."""

    BLOCKS: Final = frozenset(
        {"h1", "h2", "h3", "p", "dt", "dd", "li", "tr", "div", "section", "figcaption", "summary"}
    )
    UNSEEN: Final = frozenset({"script", "style", "title", "svg", "pre"})

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._unseen = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._unseen += tag in self.UNSEEN
        self.text += "\n" if tag in self.BLOCKS else ""

    def handle_endtag(self, tag: str) -> None:
        self._unseen -= tag in self.UNSEEN
        self.text += "\n" if tag in self.BLOCKS else ""

    def handle_data(self, data: str) -> None:
        if not self._unseen:
            self.text += data


def visible_lines(page: str) -> list[str]:
    reader = Lines()
    reader.feed(page)
    return [line for raw in reader.text.splitlines() if (line := " ".join(raw.split()))]


def answered(lines: list[str]) -> dict[str, str]:
    """Return what stands below each question, under the heading "In short", as a person reads it."""
    below = lines[
        lines.index("In short", lines.index("In short") + 1)
        if lines.count("In short") > 1
        else lines.index("In short") :
    ]
    found: dict[str, str] = {}
    for place, line in enumerate(below):
        if line in QUESTIONS and line not in found:
            found[line] = below[place + 1]
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_reader_finds_the_truth_below_each_of_the_ten_questions(case: Case) -> None:
    answers = answered(visible_lines(render(case.ledger)))
    assert tuple(answers) == QUESTIONS
    for question, wanted in zip(QUESTIONS, case.truth, strict=True):
        for word in wanted:
            # Whole words: "step 85" is no answer where step 850 is the truth.
            assert re.search(rf"(?<![\w.,]){re.escape(word)}(?![\w])", answers[question]), (
                f"{question} {answers[question]!r}"
            )


def test_no_answer_of_a_run_is_one_of_another() -> None:
    """So that a page which says the same of every run would fail."""
    told = [tuple(answered(visible_lines(render(case.ledger))).values()) for case in CASES]
    assert len(set(told)) == len(CASES)
    for case, own in zip(CASES, told, strict=True):
        for other in CASES:
            if other is not case:
                right = [
                    all(word in answer for word in wanted) for answer, wanted in zip(own, other.truth, strict=True)
                ]
                assert sum(right) < len(QUESTIONS) / 2


def test_a_browser_shows_the_same_lines(browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 800})
    for case in CASES:
        source = render(case.ledger)
        page.set_content(source)
        seen = [" ".join(line.split()) for line in page.locator("#short").inner_text().splitlines() if line.strip()]
        assert answered(seen) == answered(visible_lines(source))


def write_pages(folder: Path) -> None:
    """Write the pages, to put the questions to people: ``python -m tests.report.test_questionnaire FOLDER``."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        (folder / f"{case.name}.html").write_text(render(case.ledger), encoding="utf-8")
    (folder / "questions.txt").write_text("".join(f"{question}\n" for question in QUESTIONS))


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
