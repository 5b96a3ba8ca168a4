"""The failures of a run, one card each: what, where, whose fault, what it cost, the proof."""

from __future__ import annotations

from typing import Final

from resilient.report import words
from resilient.report.html import Child, Html, el, joined, moment_of
from resilient.report.model import Incident, Ledger
from resilient.report.shares import parts_bar
from resilient.report.units import count, duration, number, printable

_MOST_OPEN: Final = 10
"""Of more failures, the older ones are folded away: what comes after them should be found, too."""


def cards(ledger: Ledger) -> Html:
    """Return all failures, the last one first: that is the one people come for."""
    if not ledger.incidents:
        return el("p", "Nothing has failed.")
    all_cards = [_card(place, one) for place, one in enumerate(ledger.incidents, start=1)][::-1]
    last, older = all_cards[:_MOST_OPEN], all_cards[_MOST_OPEN:]
    shown = el("ol", last, class_="cards")
    if not older:
        return shown
    return joined(
        shown, el("details", el("summary", f"{len(older)} earlier failures"), el("ol", older, class_="cards"))
    )


def _card(place: int, one: Incident) -> Html:
    facts: list[tuple[str, Child]] = [
        ("When", joined(moment_of(one.at_s), f", generation {one.generation}, after step {number(one.last_step)}")),
        ("Where", words.where(one)),
        ("Whose fault", words.fault(one)),
        ("Confidence", words.confidence(one)),
        ("Why", printable(one.why) or "nobody has said"),
        ("Work lost", f"{count(one.lost_steps, 'step')}, done again"),
        ("Came back from", words.came_back(one)),
        ("What was done", f"{words.done(one.action)}{f' ({printable(one.because)})' if one.because else ''}"),
    ]
    heading = el(
        "h3",
        el("span", place, class_="badge"),
        joined(el("span", words.failure(one)), el("span", f"cost {duration(one.cost_s)}", class_="price")),
    )
    cost = joined(parts_bar(one.parts, 10, "What it cost"), el("p", words.costs(one.parts), class_="under"))
    return el(
        "li",
        heading,
        cost if one.cost_s > 0 else None,
        el("dl", [el("div", el("dt", name), el("dd", value)) for name, value in facts], class_="facts"),
        _proof(one),
        id=f"incident-{place}",
        class_="card",
    )


def _proof(one: Incident) -> Html | None:
    lines = words.proof(one)
    if not lines:
        return None
    return el("details", el("summary", f"Proof ({count(len(lines), 'line')})"), el("pre", "\n".join(lines)))
