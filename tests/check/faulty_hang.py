"""A check that never ends, and has started a process."""

from __future__ import annotations

import subprocess
import time

from resilient.check.context import Context
from resilient.check.result import Result


def check(context: Context) -> list[Result]:
    subprocess.Popen(["sh", "-c", "sleep 300; : a child of the check that hangs"])
    time.sleep(300)
    return []
