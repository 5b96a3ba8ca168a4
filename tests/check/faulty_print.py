"""A check that prints, as a library may."""

from __future__ import annotations

import os

from resilient.check.context import Context
from resilient.check.result import Result, passed


def check(context: Context) -> list[Result]:
    print("hello")
    os.write(1, b"from native code\n")
    return [passed("print", "has printed")]
