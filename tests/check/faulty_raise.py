"""A check that raises."""

from __future__ import annotations

from resilient.check.context import Context
from resilient.check.result import Result


def check(context: Context) -> list[Result]:
    raise RuntimeError("the device is gone")
