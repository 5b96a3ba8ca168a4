"""A check that crashes as native code does."""

from __future__ import annotations

import os
import signal

from resilient.check.context import Context
from resilient.check.result import Result


def check(context: Context) -> list[Result]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return []
