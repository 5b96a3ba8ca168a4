"""The marks that figures are made of: plots that fit any width, with text that keeps its size.

A plot has no viewBox: places across are percentages, places down are pixels, so that rectangles and text are drawn at
any width without a script. Curves cannot have percentages; they are in a nested picture that is stretched, with strokes
that are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from resilient.report.axis import Axis, percent_of
from resilient.report.bins import Envelope, Floats, pieces
from resilient.report.html import Child, Html, el

AXIS_HEIGHT: Final = 22
WIDE: Final = 600
"""How many units a stretched picture is wide: about the pixels of a large phone, half those of a screen."""


def plot(height: int, *children: Child, label: str) -> Html:
    """Return a picture of this height in pixels; ``label`` says in words what it shows."""
    return el("svg", *children, class_="plot", width="100%", height=height, role="img", aria_label=label)


def stretched(y: float, height: float, *children: Child, wide: float = WIDE) -> Html:
    """Return a part of a picture that is stretched to its width; inside, x is 0 to ``wide``, y 0 to ``height``."""
    box = f"0 0 {wide:g} {height:g}"
    return el("svg", *children, y=y, width="100%", height=height, viewBox=box, preserveAspectRatio="none")


def text(x: str | float, y: float, *children: Child, anchor: str | None = None, kind: str | None = None) -> Html:
    return el("text", *children, x=x, y=y, text_anchor=anchor, class_=kind)


def rect(x: float, y: float, width: float, height: float, *, kind: str, tip: str = "") -> Html:
    """Return a rectangle; ``x`` and ``width`` are shares of the width."""
    title = el("title", tip) if tip else None
    return el("rect", title, x=percent_of(x), y=y, width=percent_of(max(width, 0.0)), height=height, class_=kind)


def time_axis(axis: Axis, y: float, *, lines_from: float | None = None) -> Html:
    """Return the marks of a time axis at ``y``, with lines across the figure from ``lines_from`` down to it."""
    marks: list[Child] = []
    for number, (unix_s, label) in enumerate(axis.ticks()):
        share = axis.share(unix_s)
        anchor = "start" if share < 0.03 else "end" if share > 0.97 else "middle"
        kind = "tick" if number % 2 == 0 else "tick minor"
        if lines_from is not None:
            marks.append(el("line", x1=axis.x(unix_s), x2=axis.x(unix_s), y1=lines_from, y2=y, class_="grid"))
        marks.append(text(axis.x(unix_s), y + 15, label, anchor=anchor, kind=kind))
    return el("g", el("line", x1="0", x2="100%", y1=y, y2=y, class_="base"), marks, aria_hidden="true")


def heading(y: float, title: str, extent: str = "") -> Html:
    """Return the line above a lane: what it shows, and at its right end from what to what its scale goes.

    The scale is there and not inside, where its words would lie on what is drawn.
    """
    right = text("100%", y + 13, extent, anchor="end", kind="scale") if extent else None
    return el("g", text(0, y + 13, title, kind="lane"), right)


def grid(height: float, y: float = 0) -> Html:
    """Return the lines of a scale: its ends and its middle."""
    lines = [el("line", x1="0", x2="100%", y1=y + at, y2=y + at, class_="grid") for at in (0, height / 2, height)]
    return el("g", lines, aria_hidden="true")


def curve(xs: Sequence[float], ys: Sequence[float]) -> str:
    """Return the path through points; a point that is NaN is a gap."""
    path, pen = [], "M"
    for x, y in zip(xs, ys, strict=True):
        if math.isnan(y):
            pen = "M"
            continue
        path.append(f"{pen}{_short(x)} {_short(y)}")
        pen = "L"
    return "".join(path)


def dots(points: Sequence[tuple[float, float]]) -> str:
    """Return the path of dots: with round ends, a line of no length is one."""
    return "".join(f"M{_short(x)} {_short(y)}h0" for x, y in points)


def strokes(xs: Sequence[float], height: float) -> str:
    """Return the path of vertical lines."""
    return "".join(f"M{_short(x)} 0v{_short(height)}" for x in xs)


def mean_path(shown: Envelope, height: float, top: float) -> str:
    """Return the curve of the means; bins without a value are gaps."""
    width = WIDE / len(shown.mean)
    xs = [(number + 0.5) * width for number in range(len(shown.mean))]
    return curve(xs, list(height - height * shown.mean / top))


def band_path(shown: Envelope, height: float, top: float) -> str:
    """Return the area between the least and the largest values."""
    width = WIDE / len(shown.mean)
    path = []
    for first, end in pieces(shown.mean):
        upper = [((n + 0.5) * width, height - height * shown.high[n] / top) for n in range(first, end)]
        lower = [((n + 0.5) * width, height - height * shown.low[n] / top) for n in reversed(range(first, end))]
        path.append("M" + "L".join(f"{_short(x)} {_short(y)}" for x, y in (*upper, *lower)) + "Z")
    return "".join(path)


def steps_path(lower: Floats, upper: Floats, height: float, top: float) -> str:
    """Return the area between two curves that are level within each bin."""
    width = WIDE / len(upper)
    path = []
    for first, end in pieces(upper):
        forth = [(n + side, upper[n]) for n in range(first, end) for side in (0, 1)]
        back = [(n + side, lower[n]) for n in reversed(range(first, end)) for side in (1, 0)]
        there = (f"{_short(x * width)} {_short(height - height * y / top)}" for x, y in (*forth, *back))
        path.append("M" + "L".join(there) + "Z")
    return "".join(path)


def legend(entries: Sequence[tuple[str, str]]) -> Html:
    """Return swatches with their names: (class, name)."""
    return el(
        "ul",
        [el("li", el("i", class_=f"swatch {kind}", aria_hidden="true"), name) for kind, name in entries],
        class_="legend",
    )


def figure(*children: Child, caption: Child, axis: Axis | None = None) -> Html:
    """Return a figure; one with a time axis can be drawn wider, and shows the time under the pointer."""
    inner: Html
    if axis is None:
        inner = el("div", children)
    else:
        canvas = el("div", children, class_="canvas", data_began=repr(axis.began_s), data_ended=repr(axis.ended_s))
        inner = el("div", canvas, class_="scroller", tabindex="0", role="group", aria_label="figure, scrolls sideways")
    return el("figure", inner, el("figcaption", caption), class_="zoomable" if axis else None)


def stacked_bar(values: Sequence[tuple[str, float, str]], total: float, height: int, label: str) -> Html:
    """Return one bar made of (class, value, what is said on hover) one after the other."""
    at, marks = 0.0, []
    for kind, value, tip in values:
        share = value / total if total > 0 else 0.0
        marks.append(rect(at, 0, share, height, kind=f"seg {kind}", tip=tip))
        at += share
    return plot(height, marks, label=label)


Format = Callable[[float], str]


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
