"""TORCH_LOGS names resilient like any logger of torch's own: each line once, at the level that was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections import Counter

import pytest

SHOWN = {
    "+resilient": ["debug", "news", "trouble", "broken"],
    "resilient": ["news", "trouble", "broken"],
    "-resilient": ["broken"],
    "+dynamo": ["news", "trouble", "broken"],  # says nothing of this package
}

PROGRAM = """
    import logging, sys
    if sys.argv[1] == "configured":
        logging.basicConfig(format="root: %(message)s", level=logging.INFO)
    import resilient
    resilient.train  # what a program imports first must not matter
    from resilient.events import Bus, Notice, SaveFailed, SaveSkipped
    from resilient.observe.logs import LOGGER, show_logs
    bus = Bus()
    show_logs(bus)
    bus.emit(Notice(rank=1, message="debug"))
    bus.emit(Notice(message="news"))
    bus.emit(SaveSkipped(step=1, why="trouble"))
    LOGGER.error("broken")
"""


@pytest.mark.parametrize("value", SHOWN)
def test_each_line_comes_once_at_the_level_that_was_asked_for(value: str) -> None:
    """Also where the program has configured logging, at which torch alone would write the lines twice."""
    configured = value != "resilient"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), "configured" if configured else ""],
        env={**os.environ, "TORCH_LOGS": value},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = [line for line in done.stderr.splitlines() if line]
    words = Counter(word for line in lines for word in ("debug", "news", "trouble", "broken") if line.endswith(word))
    assert words == Counter(SHOWN[value]), done.stderr
    ours = [line for line in lines if line.endswith(tuple(words))]
    assert all(line.startswith("root: ") is not value.endswith("resilient") for line in ours)
