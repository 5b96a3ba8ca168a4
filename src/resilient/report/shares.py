"""Where the time of a run went: the wall clock by cause."""

from __future__ import annotations

from resilient.report import words
from resilient.report.axis import percent_of
from resilient.report.charts import stacked_bar
from resilient.report.html import Html, el, joined
from resilient.report.model import PRODUCTIVE, Ledger, Part, Parts
from resilient.report.units import duration, percent


def kind_of(part: Part) -> str:
    """Return the class that a part has in a figure."""
    return f"p-{part.name.lower()}"


def ordered(parts: Parts) -> list[tuple[Part, float]]:
    """Return the parts that took any time: training first, then the rest, the largest first in both."""
    there = [(part, seconds) for part, seconds in parts.items() if seconds > 0]
    return sorted(there, key=lambda each: (each[0] not in PRODUCTIVE, -each[1]))


def wall_clock(ledger: Ledger) -> Html:
    """Return one bar of the whole time, and a table of its parts."""
    wall_s = sum(ledger.parts.values())
    if wall_s <= 0:
        return el("p", "There is no time to account for yet.")
    rows = ordered(ledger.parts)
    bar = parts_bar(ledger.parts, 28, "The wall clock by cause")
    return joined(bar, el("p", _sentence(ledger), class_="under"), _table(rows, wall_s))


def parts_bar(parts: Parts, height: int, what: str) -> Html:
    """Return parts as one bar."""
    rows = ordered(parts)
    total_s = sum(seconds for _, seconds in rows)
    said = f"{what}: {', '.join(f'{part} {percent(seconds / total_s)}' for part, seconds in rows)}" if rows else what
    return stacked_bar(
        [(kind_of(part), seconds, f"{part}: {duration(seconds)}") for part, seconds in rows], total_s, height, said
    )


def _sentence(ledger: Ledger) -> str:
    wall_s = sum(ledger.parts.values())
    kept_s = sum(ledger.parts.get(part, 0.0) for part in PRODUCTIVE)
    return (
        f"{duration(kept_s)} of {duration(wall_s)} went into steps that were kept; {duration(wall_s - kept_s)} did not."
    )


def _table(rows: list[tuple[Part, float]], wall_s: float) -> Html:
    most_s = max(seconds for _, seconds in rows)
    body = []
    for productive in (True, False):
        group = [(part, seconds) for part, seconds in rows if (part in PRODUCTIVE) is productive]
        if not group:
            continue
        total_s = sum(seconds for _, seconds in group)
        heading = "Productive" if productive else "Not productive"
        body.append(
            el(
                "tr",
                el("th", heading, scope="rowgroup"),
                el("td", class_="bar-cell"),
                el("td", duration(total_s), class_="n"),
                el("td", percent(total_s / wall_s), class_="n"),
                class_="group",
            )
        )
        body += [_row(part, seconds, wall_s, most_s) for part, seconds in group]
    head = el(
        "tr",
        el("th", "Part", scope="col"),
        el("th", el("span", "Share", class_="hide"), scope="col", class_="bar-cell"),
        el("th", "Time", scope="col", class_="n"),
        el("th", "Of all", scope="col", class_="n"),
    )
    return el(
        "table",
        el("caption", "The wall clock by cause", class_="hide"),
        el("thead", head),
        el("tbody", body),
        class_="parts",
    )


def _row(part: Part, seconds: float, wall_s: float, most_s: float) -> Html:
    bar = el("span", class_=f"meter {kind_of(part)}", style=f"width:{percent_of(seconds / most_s)}", aria_hidden="true")
    name = el(
        "th",
        el("i", class_=f"swatch {kind_of(part)}", aria_hidden="true"),
        str(part),
        el("small", words.MEANING[part]),
        scope="row",
    )
    return el(
        "tr",
        name,
        el("td", bar, class_="bar-cell"),
        el("td", duration(seconds), class_="n"),
        el("td", percent(seconds / wall_s), class_="n"),
    )
