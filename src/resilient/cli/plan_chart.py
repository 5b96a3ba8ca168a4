"""ETTR over the interval, as lines of text and as an SVG file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final

from resilient.policy.planning.choosing import Limit
from resilient.policy.planning.outlook import Outlook
from resilient.report.units import duration, percent

_ROWS: Final = 15
_WIDTH: Final = 40

_STYLE: Final = (
    "text{font:13px system-ui,sans-serif;fill:#333}.line{fill:none;stroke:#0b62a4;stroke-width:2}"
    ".grid{stroke:#ddd}.best{fill:#1a7f37}.chosen{fill:#b35900}.back{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.line{stroke:#6cb6ff}.grid{stroke:#444}.best{fill:#57d364}"
    ".chosen{fill:#ffb86b}.back{fill:#161b22}}"
)
_WIDE, _HIGH, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 360, 60, 20, 50, 50
_TICKS_S: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 36000, 86400, 172800, 604800)
_MOST_TICKS: Final = 7


def heading(outlook: Outlook) -> str:
    """Return the scale above the dots of `rows`."""
    low = f"{100 * _floor(outlook):.0f} %"
    return f"{low}{'100 %':>{_WIDTH + 1 - len(low)}}"


def rows(outlook: Outlook, *, dots: str) -> list[tuple[str, str, str]]:
    """Return interval, ETTR, and a dot at the end of a line, as ``dots`` has line and dot, with best and planned."""
    kept = {outlook.best.interval_s, outlook.interval_s}
    every = max(1, math.ceil(len(outlook.curve) / _ROWS))
    shown = [point for i, point in enumerate(outlook.curve) if i % every == 0 or point[0] in kept]
    floor, line, dot = _floor(outlook), dots[0], dots[1]
    return [
        (
            duration(interval_s),
            percent(ettr),
            f"{line * round(_WIDTH * (ettr - floor) / (1 - floor))}{dot} {_mark(outlook, interval_s)}".rstrip(),
        )
        for interval_s, ettr in shown
    ]


def _floor(outlook: Outlook) -> float:
    """Where the scale of ETTR begins: at tens, below all that is shown."""
    return min(0.9, math.floor(10 * min(ettr for _, ettr in outlook.curve)) / 10)


def _mark(outlook: Outlook, interval_s: float) -> str:
    if interval_s == outlook.best.interval_s:
        return f"< {_best(outlook)}"
    return "< planned" if interval_s == outlook.interval_s else ""


def _best(outlook: Outlook) -> str:
    """Name the best interval for what it is: a budget may forbid the better ones beside it."""
    return "best within the budget" if Limit.BUDGET in (outlook.best.limit, outlook.best.near_limit) else "best"


def svg(outlook: Outlook, *, title: str) -> str:
    """Return a picture of the curve that needs nothing else, in light or dark as the reader has it."""
    across = _Axis([interval_s for interval_s, _ in outlook.curve], _LEFT, _WIDE - _RIGHT)
    floor = _floor(outlook)
    points = " ".join(f"{across.of(x):.1f},{_down(y, floor):.1f}" for x, y in outlook.curve)
    marks = [_point(across, floor, outlook.best.interval_s, outlook.best_ettr, _best(outlook))]
    if outlook.interval_s != outlook.best.interval_s:
        marks.append(_point(across, floor, outlook.interval_s, outlook.ettr, "planned"))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {_HIGH}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="back" width="{_WIDE}" height="{_HIGH}"/>',
        f'<text x="{_LEFT}" y="22">{escape(title)}</text>',
        *_shares(floor),
        *(
            f'<text x="{across.of(tick):.1f}" y="{_HIGH - _BOTTOM + 18}" text-anchor="middle">{duration(tick)}</text>'
            for tick in across.ticks()
        ),
        f'<text x="{(_LEFT + _WIDE) / 2:.0f}" y="{_HIGH - 10}" text-anchor="middle">training between two saves</text>',
        f'<polyline class="line" points="{points}"/>',
        *marks,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class _Axis:
    """A logarithmic scale of durations."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self._low, self._high = math.log(min(values)), math.log(max(values))
        self._start, self._end = start, end

    def of(self, value: float) -> float:
        share = (math.log(value) - self._low) / ((self._high - self._low) or 1.0)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        within = [tick for tick in _TICKS_S if self._low <= math.log(tick) <= self._high]
        return [float(tick) for tick in within[:: max(1, math.ceil(len(within) / _MOST_TICKS))]]


def _down(ettr: float, floor: float) -> float:
    return _TOP + (1 - (ettr - floor) / (1 - floor)) * (_HIGH - _TOP - _BOTTOM)


def _shares(floor: float) -> list[str]:
    lines = []
    for tenth in range(round(10 * floor), 11, 1 if floor >= 0.4 else 2):
        y = _down(tenth / 10, floor)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDE - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10 * tenth} %</text>')
    return lines


def _point(across: _Axis, floor: float, interval_s: float, ettr: float, name: str) -> str:
    x, y = across.of(interval_s), _down(ettr, floor)
    words = f"{name}: {duration(interval_s)}, {percent(ettr)}"
    if name.startswith("best"):
        kind, place = "best", f'x="{x:.1f}" y="{y - 12:.1f}" text-anchor="middle"'
    else:  # below, where the curve comes from
        place = f'x="{x - 8:.1f}" y="{y + 20:.1f}" text-anchor="{"end" if x > (_LEFT + _WIDE) / 3 else "start"}"'
        kind = "chosen"
    circle = f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
    return f'{circle}<text class="{kind}" {place}>{escape(words)}</text>'
