"""What options of commands mean by durations, shares and rates: finite, within sense, and refused in words."""

from __future__ import annotations

import math
import re
from typing import Any, Final

import click

from resilient.config import parse_duration

_NOTHING: Final = re.compile(r"\s*[+-]?0+(?:\.0*)?\s*([a-z]*)\s*")
_LEAST_S, _MOST_S = 1e-6, 864e6
_LEAST_RATE, _MOST_RATE = 0.001, 1e6  # a failure in a million node-days, and one each 86 s on each node


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """Seconds, from text such as ``5s``, ``2min`` or a bare number; 0 where that makes sense."""

    name = "duration"

    def __init__(self, *, zero: bool) -> None:
        self._zero = zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        nothing = _NOTHING.fullmatch(str(value)) if self._zero else None
        try:
            if nothing is not None:
                parse_duration(f"1{nothing[1] or 's'}")  # there is such a unit
                return 0.0
            seconds = parse_duration(value if number < 0 else number)
        except ValueError as error:
            self.fail(f"{value!r} {error}", param, ctx)
        if not _LEAST_S <= seconds <= _MOST_S:
            self.fail(f"{value!r} is not in the range from 1 us to 10,000 d", param, ctx)
        return seconds


class Rate(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """Failures in 1,000 node-days, as a number."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            rate = float(value)
        except ValueError:
            rate = math.nan
        if not _LEAST_RATE <= rate <= _MOST_RATE:  # neither is NaN
            self.fail(
                f"{value!r} is not in the range of numbers from {_LEAST_RATE:g} to {_MOST_RATE:,.0f}: take what your "
                "nodes do, as in 6.5, or a published figure (--preset list)",
                param,
                ctx,
            )
        return rate


class Share(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """A share from 0 to 1, from text such as ``0.9`` or ``90%``."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            self.fail(f"{value!r} must be a share, such as 0.9 or 90%", param, ctx)
        return share


TIME: Final = Duration(zero=False)
TIME_OR_NONE: Final = Duration(zero=True)
SHARE: Final = Share()
RATE: Final = Rate()
