"""The report as one HTML file that needs nothing else: no network, and no script to be read."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Final

from resilient.report import failures, saving, steps, timeline, words
from resilient.report.html import Child, Html, el, joined, moment_of
from resilient.report.inshort import answers
from resilient.report.model import Ledger
from resilient.report.shares import wall_clock
from resilient.report.units import count, duration, number, percent, printable

_LOCKED: Final = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
    "base-uri 'none'; form-action 'none'"
)
"""What a page may load: nothing. What it may run: this one script, so that nothing a run has written could."""


def render(ledger: Ledger) -> str:
    """Return the report of a run as an HTML document."""
    name = words.name_of(ledger)
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=_LOCKED.format(digest=digest)),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("link", rel="icon", href="data:,"),
        el("title", f"{name}: where the time went"),
        el("style", Html(_asset("page.css"))),
    )
    body = el("body", _header(ledger, name), el("main", _sections(ledger)), _footer(ledger), el("script", Html(script)))
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


@cache
def _asset(name: str) -> str:
    return resources.files("resilient.report").joinpath("assets", name).read_text(encoding="utf-8")


def _header(ledger: Ledger, name: str) -> Html:
    links = [
        el("a", title, href=f"#{anchor}") for anchor, title in ((section.anchor, section.short) for section in _ALL)
    ]
    return el(
        "header",
        el(
            "div",
            el("p", "resilient report", class_="brand"),
            el("button", "Dark or light", type="button", id="theme", hidden=True),
            class_="top",
        ),
        el("h1", name),
        el("p", words.state(ledger), class_="state"),
        el(
            "p",
            "From ",
            moment_of(ledger.began_s),
            " to ",
            moment_of(ledger.as_of_s),
            f", {duration(ledger.wall_s)}. ",
            el("span", printable(ledger.url), class_="place"),
            class_="meta",
        ),
        _headline(ledger),
        el("nav", links, aria_label="Sections"),
    )


def _lost_with_job(ledger: Ledger) -> str:
    job = next((one for one in ledger.stakes if one.what == "the job"), None)
    if job is None:
        return words.no_stake(ledger).partition(":")[0]
    return "all" if job.lost_s is None else duration(job.lost_s)


def _headline(ledger: Ledger) -> Html:
    cost_s = sum(one.cost_s for one in ledger.incidents)
    saved = words.saved_step(ledger)
    job = next((one for one in ledger.stakes if one.what == "the job"), None)
    largest = words.badput(ledger)[:1]
    tiles = [
        ("Productive time", percent(ledger.ettr) if ledger.wall_s > 0 else "–", _promised(ledger)),  # noqa: RUF001 -- a dash
        ("Failures", number(len(ledger.incidents)), f"cost {duration(cost_s)}" if ledger.incidents else "none"),
        ("Most lost to", str(largest[0][0]) if largest else "nothing", duration(largest[0][1]) if largest else "0 s"),
        ("Last saved step", "none" if saved is None else number(saved), f"of {number(ledger.step)}"),
        (
            "Lost if the job ended now",
            _lost_with_job(ledger),
            "" if job is None or job.step is None else f"steps since {number(job.step)}",
        ),
    ]
    return el(
        "dl",
        [
            el("div", el("dt", title), el("dd", el("strong", value), el("small", under)))
            for title, value, under in tiles
        ],
        class_="headline",
    )


def _promised(ledger: Ledger) -> str:
    if ledger.promise is None:
        return "ETTR, of the wall clock"
    return f"promised {percent(ledger.promise.promised)}, delivered {percent(ledger.promise.delivered)}"


def _in_short(ledger: Ledger) -> Html:
    rows = [el("div", el("dt", one.question), el("dd", _with_code(one.answer))) for one in answers(ledger)]
    return el("dl", rows, class_="questions")


def _with_code(sentence: str) -> list[Child]:
    """Return a sentence of ours in which commands stand between backticks."""
    return [el("code", piece) if place % 2 else piece for place, piece in enumerate(sentence.split("`"))]


def _life(ledger: Ledger) -> Child:
    return timeline.life(ledger) if ledger.generations else el("p", "No generation has begun.")


def _ettr(ledger: Ledger) -> Child:
    return timeline.productive(ledger) if ledger.generations else el("p", "There is no time to account for yet.")


def _steps(ledger: Ledger) -> Child:
    sentence = el("p", printable(ledger.bottleneck), class_="lead") if ledger.bottleneck else None
    over_time = steps.together(ledger)
    close = steps.close_up(ledger)
    return joined(
        sentence,
        steps.ranks(ledger),
        joined(el("h3", "Steps and machines on one axis"), over_time) if over_time else None,
        joined(el("h3", "Close up"), close) if close else None,
    )


def _stakes(ledger: Ledger) -> Child:
    if not ledger.stakes:
        return el("p", f"What would be lost now: {words.no_stake(ledger)}.")
    rows = [el("div", el("dt", f"With {one.what}"), el("dd", words.stake(one))) for one in ledger.stakes]
    return el("dl", rows, class_="questions")


def _changes(ledger: Ledger) -> Child:
    return el("ol", [el("li", _with_code(one)) for one in words.advice(ledger)], class_="advice")


def _missing(ledger: Ledger) -> Child:
    if not ledger.missing:
        return el("p", "Nothing is missing from this account.")
    return el("ul", [el("li", printable(one)) for one in ledger.missing])


def _notes(ledger: Ledger) -> Child:
    if not ledger.notes:
        return el("p", "Nothing else was noted.")
    last = ledger.notes[-_MOST_NOTES:]
    rows = [
        el(
            "tr",
            el("td", moment_of(one.at_s)),
            el("td", one.kind),
            el("td", f"{one.rank}", class_="n"),
            el("td", one.message),
        )
        for one in reversed(last)
    ]
    head = el(
        "tr",
        el("th", "When", scope="col"),
        el("th", "What", scope="col"),
        el("th", "Rank", scope="col", class_="n"),
        el("th", "Message", scope="col"),
    )
    caption = (
        f"The last {len(last)} of {len(ledger.notes)}"
        if len(last) < len(ledger.notes)
        else f"{count(len(last), 'note')}, the last first"
    )
    table = el(
        "div", el("table", el("caption", caption), el("thead", head), el("tbody", rows)), class_="wide", tabindex="0"
    )
    return el("details", el("summary", count(len(ledger.notes), "note")), table)


_MOST_NOTES: Final = 200


class _Section:
    def __init__(self, anchor: str, title: str, short: str, content: Callable[[Ledger], Child]) -> None:
        self.anchor = anchor
        self.title = title
        self.short = short
        self.content = content


_ALL: Final = (
    _Section("short", "In short", "In short", _in_short),
    _Section("change", "What to change", "What to change", _changes),
    _Section("timeline", "Timeline", "Timeline", _life),
    _Section("time", "Where the time went", "Time", wall_clock),
    _Section("ettr", "Productive time over time", "Productive time", _ettr),
    _Section("incidents", "Failures", "Failures", failures.cards),
    _Section("stakes", "What would be lost now", "At stake", _stakes),
    _Section("steps", "What a step is spent on", "Steps", _steps),
    _Section("saves", "Saves", "Saves", saving.saves),
    _Section("restores", "Restores", "Restores", lambda ledger: saving.restores(ledger.restores)),
    _Section("notes", "Notes", "Notes", _notes),
    _Section("missing", "What is missing", "Missing", _missing),
)


def _sections(ledger: Ledger) -> Child:
    return [
        el(
            "section",
            el("h2", one.title, id=f"{one.anchor}-title"),
            one.content(ledger),
            id=one.anchor,
            aria_labelledby=f"{one.anchor}-title",
        )
        for one in _ALL
    ]


def _footer(ledger: Ledger) -> Html:
    return el(
        "footer",
        el("p", f"Run {printable(ledger.run_id)}. The account ends at ", moment_of(ledger.as_of_s), "."),
        el("p", "Made from what the run has written down, without its help; this file loads nothing from anywhere."),
    )
