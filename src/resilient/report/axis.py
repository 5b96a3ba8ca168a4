"""A time axis: where a moment is on it, and which moments are marked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from resilient.report.units import when

_STEPS_S: Final = (
    *(1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10_800, 21_600, 43_200),
    *(86_400, 172_800, 604_800, 1_209_600, 2_592_000, 7_776_000),
)
_MOST_TICKS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """From ``began_s`` to ``ended_s``, unix seconds."""

    began_s: float
    ended_s: float

    @property
    def span_s(self) -> float:
        return max(self.ended_s - self.began_s, 1e-6)

    def share(self, unix_s: float) -> float:
        """Return where a moment is, from 0 to 1; one that is outside is at the edge."""
        return min(1.0, max(0.0, (unix_s - self.began_s) / self.span_s))

    def x(self, unix_s: float) -> str:
        """Return where a moment is, in percent of the width."""
        return percent_of(self.share(unix_s))

    def ticks(self) -> list[tuple[float, str]]:
        """Return round moments in UTC with their labels, at most eight of them."""
        step_s = next((step for step in _STEPS_S if self.span_s / step <= _MOST_TICKS), _STEPS_S[-1])
        first = math.ceil(self.began_s / step_s)
        last = math.floor(self.ended_s / step_s)
        jump = math.ceil((last - first + 1) / _MOST_TICKS) or 1
        return [(at * step_s, _label(at * step_s, step_s)) for at in range(first, last + 1, jump)]


def percent_of(share: float) -> str:
    """Return a share as a length in SVG and CSS."""
    return f"{100 * share:.3f}".rstrip("0").rstrip(".") + "%"


def nice(peak: float) -> float:
    """Return the end of a scale: the next of 1, 1.5, 2, 3, 4, 5, 6, 8, 10 times a power of ten."""
    if not math.isfinite(peak) or peak <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(peak))
    return next(float(step * power) for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 20) if step * power >= peak * 0.999_999)


def _label(unix_s: float, step_s: int) -> str:
    moment = when(unix_s)
    if step_s >= 86_400 or (step_s >= 3600 and moment.hour == 0):
        return f"{moment:%b} {moment.day}"
    return f"{moment:%H:%M:%S}" if step_s < 60 else f"{moment:%H:%M}"
