"""How numbers, times and names of a run are written for people."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import Final

from resilient.format import sizes

_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_DAY_S: Final = 86_400

_INVISIBLE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
"""What a terminal would obey, what turns the order of letters around, and what is no letter at all."""


def printable(text: str) -> str:
    """Return a text in which everything can be seen: what a run has written down may hold anything.

    Escape sequences would move the cursor of a terminal, and marks of direction show another text than there is.
    """
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text.replace("\r\n", "\n").replace("\t", "    "))


def one_line(text: str, *, most: int = 200) -> str:
    """Return the text as a single line of ``most`` characters at most."""
    line = " ".join(printable(text).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def duration(seconds: float) -> str:
    """Return a duration by its two largest units: ``2 min 5 s``, ``3 h 12 min``, ``1.4 s``, ``35 ms``."""
    if not math.isfinite(seconds):
        return "not known"
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 10:
        return _short(seconds)
    whole = round(seconds)
    for size_s, name, next_s, next_name in (
        (_DAY_S, "d", _HOUR_S, "h"),
        (_HOUR_S, "h", _MINUTE_S, "min"),
        (_MINUTE_S, "min", 1, "s"),
    ):
        if whole >= size_s:
            rest = (whole % size_s) // next_s
            return f"{whole // size_s} {name} {rest} {next_name}" if rest else f"{whole // size_s} {name}"
    return f"{whole} s"


def _short(seconds: float) -> str:
    if seconds == 0:
        return "0 s"
    if seconds < 0.000_1:
        return "under 0.1 ms"
    if seconds < 0.0095:
        return f"{1000 * seconds:.1f} ms".replace(".0 ", " ")
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s".replace(".0 ", " ")


def percent(share: float) -> str:
    """Return a share as a percentage; one that is neither nothing nor all never looks like it."""
    if not math.isfinite(share):
        return "not known"
    if 0 < share < 0.0005:
        return "under 0.1 %"
    if 0.9995 <= share < 1:
        return "over 99.9 %"
    return f"{100 * share:.1f} %"


def number(value: float) -> str:
    """Return a whole number with a comma between thousands."""
    return f"{value:,.0f}"


def count(value: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun: ``1 save``, ``2 saves``."""
    return f"{number(value)} {one if value == 1 else many or f'{one}s'}"


def rate(bytes_per_s: float) -> str:
    """Return bytes a second in the largest unit of which there is at least one."""
    return f"{sizes.in_words(round(bytes_per_s))}/s"


def when(unix_s: float) -> datetime:
    """Return a moment in UTC."""
    return datetime.fromtimestamp(unix_s, UTC)


def moment(unix_s: float) -> str:
    """Return a moment to the second: ``2026-12-01 12:50:28 UTC``."""
    return f"{when(unix_s):%Y-%m-%d %H:%M:%S} UTC"


def quantile(values: list[float], share: float) -> float:
    """Return the smallest value that ``share`` of all values do not exceed (nearest rank); NaN if there are none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def join(words: list[str]) -> str:
    """Return ``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""
