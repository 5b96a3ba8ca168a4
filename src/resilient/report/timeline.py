"""The figures over the whole life of a run: generations, steps, saves, failures; productive time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from resilient.report import words
from resilient.report.axis import Axis, nice, percent_of
from resilient.report.charts import (
    AXIS_HEIGHT,
    WIDE,
    curve,
    figure,
    grid,
    heading,
    legend,
    plot,
    stretched,
    strokes,
    text,
    time_axis,
)
from resilient.report.html import Child, Html, el, joined
from resilient.report.model import PRODUCTIVE, GenerationTime, Incident, Ledger, Note, Part
from resilient.report.units import count, duration, moment, number, one_line, percent

_MOST_LABELED: Final = 60
_MOST_NOTES: Final = 300
_STEPS_HEIGHT: Final = 96.0
_ETTR_HEIGHT: Final = 130


def life(ledger: Ledger) -> Html:
    """Return the timeline of a run: generations, their steps, saves, incidents and notes on one axis."""
    axis = Axis(began_s=ledger.began_s, ended_s=ledger.as_of_s)
    y = 0.0
    lanes: list[Child] = []
    titles: list[Child] = []
    failed_saves = sum(one.error is not None for one in ledger.saves)
    steps_top = _steps_top(ledger)
    for title, extent, height, marks in (
        ("Generations", number(len(ledger.generations)), 24.0, _generations(ledger, axis)),
        ("Failures", number(len(ledger.incidents)), 24.0, _incidents(ledger.incidents, axis)),
        ("Steps; a drop is lost work", f"0 to {number(steps_top)}", _STEPS_HEIGHT, _steps(ledger, axis, steps_top)),
        (
            "Saves, crossed where failed",
            f"{number(len(ledger.saves))}, {failed_saves} failed",
            14.0,
            _saves(ledger, axis),
        ),
        ("Notes: stops, stragglers, hangs", number(len(ledger.notes)), 16.0, _notes(ledger.notes, axis)),
    ):
        titles.append(heading(y, title, extent))
        lanes.append(el("svg", marks, x=0, y=y + 20, width="100%", height=height, overflow="visible"))
        y += 20 + height + 14
    failures = [
        el("line", x1=axis.x(one.at_s), x2=axis.x(one.at_s), y1=44, y2=y - 8, class_="failure-line")
        for one in ledger.incidents[:_MOST_LABELED]
    ]
    said = f"Timeline: {count(len(ledger.generations), 'generation')}, {count(len(ledger.incidents), 'failure')}, "
    said += f"{count(len(ledger.saves), 'save')} in {duration(ledger.wall_s)}"
    shown = plot(round(y) + AXIS_HEIGHT, failures, lanes, titles, time_axis(axis, y), label=said)
    return figure(shown, caption="Times are UTC. Numbers lead to the failures below.", axis=axis)


def _generations(ledger: Ledger, axis: Axis) -> list[Child]:
    marks: list[Child] = []
    for one in ledger.generations:
        begin, end = axis.share(one.began_s), axis.share(one.ended_s)
        wide = max(end - begin, 0.001)
        tip = f"generation {one.generation}: {moment(one.began_s)}, {duration(one.ended_s - one.began_s)}, "
        tip += f"{count(one.world_size, 'rank')}, step {number(one.last_step)}, {one.end}"
        box = el(
            "rect",
            el("title", tip),
            x=percent_of(begin),
            width=percent_of(wide),
            y=0,
            height=24,
            class_=f"gen {one.end}",
        )
        # On a phone there is room for the number alone.
        size = el("tspan", f" · {count(one.world_size, 'rank')}", class_="minor") if wide >= 0.11 else None
        shown = wide > 0.045 and len(ledger.generations) <= _MOST_LABELED
        label = (
            text(percent_of(begin + wide / 2), 16, f"{one.generation}", size, anchor="middle", kind="gen-name")
            if shown
            else None
        )
        marks.append(joined(box, label))
    return marks


def _incidents(incidents: Sequence[Incident], axis: Axis) -> list[Child]:
    marks: list[Child] = []
    for place, one in enumerate(incidents, start=1):
        tip = f"{place}: {words.failure(one)}, {moment(one.at_s)}, {words.where(one)}, cost {duration(one.cost_s)}"
        x = axis.x(one.at_s)
        marks.append(
            el(
                "a",
                el("title", tip),
                el("circle", cx=x, cy=12, r=11),
                text(x, 16, place, anchor="middle"),
                href=f"#incident-{place}",
                class_="incident-mark",
                aria_label=tip,
            )
        )
    return marks


def _steps_top(ledger: Ledger) -> float:
    return nice(float(max((one.last_step for one in ledger.generations), default=0)))


def _steps(ledger: Ledger, axis: Axis, top: float) -> list[Child]:
    xs: list[float] = []
    ys: list[float] = []
    drops: list[str] = []
    for one in ledger.generations:
        begins_s = min(one.ended_s, one.began_s + _before_training_s(one))
        for at_s, step in ((begins_s, one.resumed_step or 0), (one.ended_s, one.last_step)):
            xs.append(axis.share(at_s) * WIDE)
            ys.append(_STEPS_HEIGHT - _STEPS_HEIGHT * step / top)
        if one.kept_step is not None and one.kept_step < one.last_step:
            kept = _STEPS_HEIGHT - _STEPS_HEIGHT * one.kept_step / top
            drops.append(curve((xs[-1], xs[-1]), (ys[-1], kept)))
        xs.append(xs[-1])
        ys.append(math.nan)
    lines = [el("path", d=curve(xs, ys), class_="line"), el("path", d="".join(drops), class_="line drop")]
    return [grid(_STEPS_HEIGHT), stretched(0, _STEPS_HEIGHT, lines)]


def _before_training_s(one: GenerationTime) -> float:
    """Return for how long a generation did not train after it had begun."""
    return sum(one.parts.get(part, 0.0) for part in (Part.REFORMATION, Part.START, Part.RESTORE))


def _saves(ledger: Ledger, axis: Axis) -> list[Child]:
    good = [axis.share(one.at_s) * WIDE for one in ledger.saves if one.error is None]
    marks: list[Child] = [stretched(0, 14, el("path", d=strokes(_apart(good), 14), class_="save-mark"))]
    for one in [one for one in ledger.saves if one.error is not None][:_MOST_NOTES]:
        tip = f"the save of step {number(one.step)} failed, {moment(one.at_s)}: {one_line(one.error or '')}"
        marks.append(text(axis.x(one.at_s), 12, el("title", tip), "×", anchor="middle", kind="failed-save"))  # noqa: RUF001 -- the sign
    return marks


def _apart(xs: Sequence[float]) -> list[float]:
    """Return places without those that would be drawn over one another."""
    return sorted({round(4 * x) / 4 for x in xs})


def _notes(notes: Sequence[Note], axis: Axis) -> list[Child]:
    marks: list[Child] = []
    for one in notes[:_MOST_NOTES]:
        tip = f"{one_line(one.kind)}, rank {one.rank}, {moment(one.at_s)}: {one_line(one.message)}"
        marks.append(text(axis.x(one.at_s), 13, el("title", tip), "◆", anchor="middle", kind="note-mark"))
    return marks


def productive(ledger: Ledger) -> Html:
    """Return the share of productive time over the life of a run: of each hour, and since the beginning."""
    axis = Axis(began_s=ledger.began_s, ended_s=ledger.as_of_s)
    since = cumulative(ledger)
    hour = [(at, share) for at, share in ledger.ettr_hours if ledger.began_s <= at <= ledger.as_of_s]
    height = _ETTR_HEIGHT
    settled_s = ledger.began_s + 0.1 * ledger.wall_s
    least = min((share for at, share in (*since, *hour) if at >= settled_s), default=0.0)
    bottom = 0.5 if least > 0.52 else 0.0
    lines: list[Child] = [
        el("path", d=_line(since, axis, height, bottom), class_="line"),
        el("path", d=_line(_thinned(hour), axis, height, bottom), class_="line second"),
    ]
    marks: list[Child] = [grid(height, 22), stretched(22, height, *lines)]
    entries = [("line-key", "since the beginning"), ("line-key second", "of the hour before")]
    if ledger.promise is not None:
        y = 22 + _y(min(1.0, ledger.promise.promised), height, bottom)
        marks.append(el("line", x1="0", x2="100%", y1=y, y2=y, class_="promise"))
        entries.append(("line-key promise", f"promised: {percent(ledger.promise.promised)}"))
    said = f"Share of productive time: {percent(ledger.ettr)} since the beginning"
    said += f", {percent(hour[-1][1])} in the last hour" if hour else ""
    title = heading(0, "Share of the wall clock", f"{100 * bottom:.0f} to 100 %")
    shown = plot(height + 22 + AXIS_HEIGHT, title, time_axis(axis, height + 22, lines_from=22), marks, label=said)
    caption = "The effective training time ratio (ETTR); within a generation, lost time is taken as spread evenly."
    return joined(legend(entries), figure(shown, caption=caption, axis=axis))


def cumulative(ledger: Ledger) -> list[tuple[float, float]]:
    """Return (unix seconds, ETTR since the beginning) as far as generations tell it; it ends at the ledger's own."""
    points: list[tuple[float, float]] = []
    kept_s = 0.0
    for one in ledger.generations:
        begins_s = min(one.ended_s, one.began_s + _before_training_s(one))
        here_s = sum(one.parts.get(part, 0.0) for part in PRODUCTIVE)
        for sample in range(_SAMPLES + 1):
            at_s = begins_s + (one.ended_s - begins_s) * sample / _SAMPLES
            wall_s = at_s - ledger.began_s
            if wall_s > 0:
                points.append((at_s, min(1.0, (kept_s + here_s * sample / _SAMPLES) / wall_s)))
        kept_s += here_s
    if ledger.wall_s > 0 and ledger.generations:
        points.append((ledger.as_of_s, ledger.ettr))
    return points


_SAMPLES: Final = 24


def _line(points: Sequence[tuple[float, float]], axis: Axis, height: float, bottom: float) -> str:
    return curve([axis.share(at) * WIDE for at, _ in points], [_y(share, height, bottom) for _, share in points])


def _y(share: float, height: float, bottom: float) -> float:
    return height * (1 - share) / (1 - bottom)


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    return points[:: max(1, len(points) // WIDE)]
