"""A source that says something odd is told about once, and asked again."""

from __future__ import annotations

import threading

from resilient.detect.notice import Notice
from resilient.detect.polling import Poller


class Odd:
    name = "an odd source"

    def __init__(self) -> None:
        self.asked = 0
        self.answered = threading.Event()

    def poll(self) -> Notice | None:
        self.asked += 1
        if self.asked < 3:
            raise TypeError("'NoneType' object is not iterable")
        self.answered.set()
        return Notice(why="at last")


def test_a_source_that_is_not_understood_is_asked_again() -> None:
    told: list[str] = []
    source = Odd()
    poller = Poller(source, 0.01, notice=told.append)
    poller.start()
    try:
        assert source.answered.wait(10)
    finally:
        poller.close()
    assert poller.newest is not None
    assert told == ["an odd source does not say whether to stop: TypeError: 'NoneType' object is not iterable"]
