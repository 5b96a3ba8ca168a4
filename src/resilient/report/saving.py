"""Saves and restores of a run: how many, what they cost, how they went over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from resilient.format import sizes
from resilient.report import words
from resilient.report.axis import Axis, nice
from resilient.report.charts import AXIS_HEIGHT, WIDE, dots, figure, grid, heading, plot, stretched, time_axis
from resilient.report.html import Child, Html, el, joined, moment_of
from resilient.report.model import Ledger, RestoreTime, SaveTime
from resilient.report.units import count, duration, number, one_line, quantile

_HEIGHT: Final = 70
_MOST_DOTS: Final = 2000
_MOST_ROWS: Final = 50


def facts(ledger: Ledger) -> list[tuple[str, str]]:
    """Return what is worth knowing of the saves, as (what, how much)."""
    saves = ledger.saves
    stalls = [one.stall_s for one in saves]
    persists = [one.persist_s for one in saves if one.persist_s is not None]
    failed = sum(one.error is not None for one in saves)
    usual_s = words.interval_s(ledger)
    sent = sum(one.sent or 0 for one in saves)
    found = [
        ("saves", number(len(saves))),
        ("failed", number(failed)),
        ("usual interval", "not known" if usual_s is None else duration(usual_s)),
        ("stall, median", duration(quantile(stalls, 0.5))),
        ("stall, 95 %", duration(quantile(stalls, 0.95))),
        ("persist, median", duration(quantile(persists, 0.5))),
        ("persist, 95 %", duration(quantile(persists, 0.95))),
    ]
    return [*found, ("written by rank 0", sizes.in_words(sent))] if sent else found


def sentence(ledger: Ledger) -> str:
    """Return what is worth knowing of the saves, in one sentence."""
    known = dict(facts(ledger))
    how_often = "" if words.interval_s(ledger) is None else f", usually {known['usual interval']} apart"
    stall = f"{known['stall, median']} (95 %: {known['stall, 95 %']})"
    persist = f"{known['persist, median']} (95 %: {known['persist, 95 %']})"
    return (
        f"{count(len(ledger.saves), 'save')}, {known['failed']} failed{how_often}; "
        f"training held up for {stall}, durable after {persist}, medians"
    )


def saves(ledger: Ledger) -> Html:
    """Return the saves: figures, how stall and persist went over time, and those that failed."""
    if not ledger.saves:
        return el("p", "Nothing was saved.")
    tiles = el("dl", [el("div", el("dt", name), el("dd", value)) for name, value in facts(ledger)], class_="tiles")
    return joined(tiles, _over_time(ledger), _failed([one for one in ledger.saves if one.error is not None]))


def _over_time(ledger: Ledger) -> Html:
    axis = Axis(began_s=ledger.began_s, ended_s=ledger.as_of_s)
    marks: list[Child] = []
    y = 0.0
    for title, value in (
        ("Stall: training held up", lambda one: one.stall_s),
        ("Persist: until durable", lambda one: one.persist_s),
    ):
        marks.append(_dots(title, value, ledger.saves, axis, y))
        y += 22 + _HEIGHT + 12
    said = "Stall and persist time of each save over time; the figures above sum them up"
    caption = "Each dot is a save, as rank 0 saw it. Times are UTC."
    return figure(plot(round(y) + AXIS_HEIGHT, marks, time_axis(axis, y), label=said), caption=caption, axis=axis)


def _dots(
    title: str, value: Callable[[SaveTime], float | None], all_saves: Sequence[SaveTime], axis: Axis, y: float
) -> Html:
    known = [(one.at_s, seconds) for one in all_saves if (seconds := value(one)) is not None]
    top = nice(max((seconds for _, seconds in known), default=0.0))
    # Of very many, the largest of each group: those are what one looks for.
    group = -(-len(known) // _MOST_DOTS) or 1
    known = [max(known[at : at + group], key=lambda each: each[1]) for at in range(0, len(known), group)]
    places = [(axis.share(at_s) * WIDE, _HEIGHT - _HEIGHT * seconds / top) for at_s, seconds in known]
    return el(
        "g",
        heading(y, title, f"0 to {duration(top)}"),
        grid(_HEIGHT, y + 22),
        stretched(y + 22, _HEIGHT, el("path", d=dots(places), class_="dots")),
    )


def _failed(failed: Sequence[SaveTime]) -> Html | None:
    if not failed:
        return None
    rows = [
        el(
            "tr",
            el("td", moment_of(one.at_s)),
            el("td", number(one.step), class_="n"),
            el("td", one_line(one.error or "")),
        )
        for one in failed[-_MOST_ROWS:]
    ]
    head = el(
        "tr", el("th", "When", scope="col"), el("th", "Step", scope="col", class_="n"), el("th", "Why", scope="col")
    )
    title = f"{count(len(failed), 'save')} failed" + (f"; the last {_MOST_ROWS}" if len(failed) > _MOST_ROWS else "")
    return el(
        "div", el("table", el("caption", title), el("thead", head), el("tbody", rows)), class_="wide", tabindex="0"
    )


def restores(found: Sequence[RestoreTime]) -> Html:
    """Return a table of the restores."""
    if not found:
        return el("p", "Nothing was restored.")
    names = ("When", "Step", "Took", "Read", "From")
    head = el(
        "tr", [el("th", name, scope="col", class_="n" if name in {"Step", "Took", "Read"} else None) for name in names]
    )
    rows = [
        el(
            "tr",
            el("td", moment_of(one.at_s)),
            el("td", number(one.step), class_="n"),
            el("td", duration(one.duration_s), class_="n"),
            el("td", sizes.in_words(one.nbytes), class_="n"),
            el("td", words.origins(one.sources) if one.sources else "not recorded"),
        )
        for one in found[-_MOST_ROWS:]
    ]
    caption = el("caption", f"The last {_MOST_ROWS} of {len(found)}") if len(found) > _MOST_ROWS else None
    return el("div", el("table", caption, el("thead", head), el("tbody", rows)), class_="wide", tabindex="0")
