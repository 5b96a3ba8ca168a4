"""A stop request as a file: one that was there before is none."""

from __future__ import annotations

import os
from pathlib import Path

from resilient.detect.file import StopFile


def test_a_file_that_is_made_asks_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "stop"
    asked = StopFile(path)
    assert asked.poll() is None
    path.write_text("node 7 is drained\nmore\n")
    notice = asked.poll()
    assert notice is not None
    assert "node 7 is drained" in notice.why
    assert notice.within_s is None


def test_what_an_earlier_stop_has_left_asks_nothing_until_it_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "stop"
    path.touch()
    asked = StopFile(path)
    assert asked.poll() is None
    os.utime(path, (1, 1))
    assert asked.poll() is not None
    path.unlink()
    assert asked.poll() is None
    path.touch()
    assert asked.poll() is not None
