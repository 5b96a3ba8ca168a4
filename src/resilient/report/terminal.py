"""The report on a terminal: the run in one screen, then failures, saves, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from resilient.format import sizes
from resilient.report import saving, words
from resilient.report.model import PRODUCTIVE, Incident, Ledger, Part, Parts
from resilient.report.shares import ordered
from resilient.report.units import count, duration, moment, number, one_line, percent, printable

_COLORS: Final = {
    Part.COMPUTE: "blue",
    Part.EXCHANGE: "cyan",
    Part.DATA: "bright_blue",
    Part.OUTSIDE: "bright_black",
    Part.SAVE: "yellow",
    Part.RESTORE: "magenta",
    Part.START: "bright_yellow",
    Part.LOST: "red",
    Part.DETECTION: "bright_red",
    Part.REFORMATION: "bright_magenta",
    Part.IDLE: "white",
}
_BAR: Final = 60
_METER: Final = 30
_MOST_INCIDENTS: Final = 20


def summary(ledger: Ledger) -> RenderableType:
    """Return the report of a run for a rich console. What a run has written down is shown, never obeyed."""
    return Group(*_blocks(ledger))


def _blocks(ledger: Ledger) -> Iterator[RenderableType]:
    yield Text(words.state(ledger), style="bold")
    yield Text(f"{printable(ledger.url)}, {moment(ledger.began_s)} to {moment(ledger.as_of_s)}", style="dim")
    yield from _productive(ledger)
    yield from _section("Failures", _incidents(ledger))
    yield from _section("What would be lost now", _stakes(ledger))
    yield from _section("Saves", _saves(ledger))
    if ledger.restores:
        yield from _section("Restores", _restores(ledger))
    if ledger.bottleneck:
        yield from _section("A step", Text(printable(ledger.bottleneck)))
    yield from _section("What to change", _numbered(words.advice(ledger)))
    if ledger.missing:
        yield from _section("What is missing", _numbered(tuple(printable(one) for one in ledger.missing)))


def _section(title: str, inner: RenderableType) -> Iterator[RenderableType]:
    yield Text(f"\n{title}", style="bold")
    yield Padding(inner, (0, 0, 0, 2))


def _productive(ledger: Ledger) -> Iterator[RenderableType]:
    wall_s = sum(ledger.parts.values())
    if wall_s <= 0:
        yield Text("\nThere is no time to account for yet.")
        return
    said = words.promise(ledger)
    share = f"\n{percent(ledger.ettr)} of {duration(ledger.wall_s)} was productive (ETTR {ledger.ettr:.3f})"
    yield Text(share + (f"; {said}" if said else ""), style="bold")
    yield bar(ledger.parts)
    yield Padding(_parts(ledger.parts, wall_s), (0, 0, 0, 2))


def bar(parts: Parts, width: int = _BAR) -> Text:
    """Return the wall clock by cause as a bar; without color, lower shades are what was not productive."""
    rows = ordered(parts)
    total_s = sum(seconds for _, seconds in rows)
    drawn = Text()
    at, shown = 0.0, 0
    for part, seconds in rows:
        at += seconds
        upto = round(width * at / total_s)
        drawn.append(("█" if part in PRODUCTIVE else "▒") * (upto - shown), style=_COLORS[part])
        shown = upto
    return drawn


def _parts(parts: Parts, wall_s: float) -> Table:
    table = _table("", "", "", "", right=(1, 2))
    table.show_header = False
    rows = ordered(parts)
    most_s = max(seconds for _, seconds in rows)
    for part, seconds in rows:
        mark = "█" if part in PRODUCTIVE else "▒"
        meter = Text(mark * max(1, round(_METER * seconds / most_s)), style=_COLORS[part])
        table.add_row(Text(str(part)), Text(duration(seconds)), Text(percent(seconds / wall_s)), meter)
    return table


def _incidents(ledger: Ledger) -> RenderableType:
    if not ledger.incidents:
        return Text("Nothing has failed.")
    first = max(0, len(ledger.incidents) - _MOST_INCIDENTS)
    shown = list(enumerate(ledger.incidents, start=1))[first:]
    rows = [_columns(place, one) for place, one in shown]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[RenderableType] = []
    for (_, one), row in zip(shown, rows, strict=True):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        lines.append(Text(line, style="bold"))
        details = (words.costs(one.parts), f"back at {words.came_back(one)}; {words.done(one.action)}")
        lines.append(Padding(Text("\n".join(details)), (0, 0, 0, widths[0] + 2)))
    older = [Text(f"the last {_MOST_INCIDENTS} of {len(ledger.incidents)}")] if first else []
    return Group(*older, *lines)


def _columns(place: int, one: Incident) -> tuple[str, ...]:
    return (
        f"{place}",
        moment(one.at_s).removesuffix(" UTC") + "Z",
        one_line(one.failure, most=40),
        words.where(one),
        f"{words.fault_brief(one)}{f' ({one_line(one.confidence, most=20)})' if one.confidence else ''}",
        f"cost {duration(one.cost_s)}",
    )


def _stakes(ledger: Ledger) -> RenderableType:
    if not ledger.stakes:
        return Text(words.no_stake(ledger))
    table = _table("", "")
    table.show_header = False
    for one in ledger.stakes:
        table.add_row(Text(f"with {one_line(one.what)}"), Text(words.stake(one)))
    return table


def _saves(ledger: Ledger) -> RenderableType:
    if not ledger.saves:
        return Text("Nothing was saved.")
    return Text(saving.sentence(ledger))


def _restores(ledger: Ledger) -> RenderableType:
    last = ledger.restores[-1]
    origin = words.origins(last.sources) if last.sources else "not recorded where from"
    said = f"{count(len(ledger.restores), 'restore')}; the last: step {number(last.step)}, "
    return Text(f"{said}{sizes.in_words(last.nbytes)} in {duration(last.duration_s)}, {origin}")


def _numbered(sentences: tuple[str, ...]) -> Table:
    table = _table("", "", right=(0,))
    table.show_header = False
    for place, sentence in enumerate(sentences, start=1):
        table.add_row(Text(f"{place}."), Text(sentence))
    return table


def _table(*names: str, right: tuple[int, ...] = ()) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(names):
        table.add_column(name, justify="right" if place in right else "left", overflow="fold")
    return table
