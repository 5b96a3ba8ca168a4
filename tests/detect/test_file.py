"""A stop request as a file: one that was there before is none."""

from __future__ import annotations

import os
from pathlib import Path

from resilient.detect.file import StopFile
from resilient.elastic.node import Node


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


def test_what_is_made_between_two_lives_of_one_start_asks_the_second_one(tmp_path: Path) -> None:
    path, node = tmp_path / "stop", Node(tmp_path)
    node.name_job("first")
    assert StopFile(path, keep=node.keep).poll() is None
    path.touch()
    node.clear()
    assert StopFile(path, keep=node.keep).poll() is not None
    node.name_job("second")
    assert StopFile(path, keep=node.keep).poll() is None, "of another start"
