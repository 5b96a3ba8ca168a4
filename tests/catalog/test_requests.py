"""Requests to a running job: numbered, seen once, and only by those that they are for."""

from __future__ import annotations

import dataclasses
import re
import threading
from pathlib import Path

import pytest

from resilient.catalog.generations import claim_generation
from resilient.catalog.requests import Request, RequestWatch, ask, newest_request
from resilient.clock import SYSTEM_CLOCK
from resilient.errors import ErrorKind, StoreError
from resilient.format import layout
from resilient.store.memory import MemoryStore

SPEC = (Path(__file__).parents[2] / "docs/spec/format.md").read_text()


def test_a_watch_sees_each_request_that_comes_later_once() -> None:
    store = MemoryStore()
    assert newest_request(store) == (0, None)
    old = ask(store, "stop", why="", clock=SYSTEM_CLOCK)
    number, found = newest_request(store)
    assert (number, found) == (1, old)
    watch = RequestWatch(store, number)
    assert watch.poll() is None
    new = [
        ask(store, "resize", nodes=3, why="two for another job", clock=SYSTEM_CLOCK),
        ask(store, "stop", why="", clock=SYSTEM_CLOCK),
    ]
    assert [watch.poll(), watch.poll(), watch.poll()] == [*new, None]
    assert (new[0].kind, new[0].nodes, new[0].launch) == ("resize", 3, "")


def test_a_request_is_for_the_launch_that_was_newest() -> None:
    store = MemoryStore()
    claim_generation(store, world_size=1, launch="a-launch", heartbeat=True)
    request = ask(store, "stop", why="", clock=SYSTEM_CLOCK)
    assert request.is_for("a-launch")
    assert not request.is_for("the next one")


def test_of_two_who_ask_at_once_both_are_heard() -> None:
    store = MemoryStore()
    asking = [
        threading.Thread(target=ask, args=(store, "stop"), kwargs={"why": str(n), "clock": SYSTEM_CLOCK})
        for n in range(8)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    watch = RequestWatch(store, 0)
    found = [watch.poll() for _ in range(9)]
    assert {each.why for each in found if each} == {str(n) for n in range(8)}
    assert found[-1] is None


def test_a_request_that_is_damaged_is_passed_over() -> None:
    store = MemoryStore()
    for _ in range(2):
        ask(store, "stop", why="", clock=SYSTEM_CLOCK)
    store.put(layout.request(1), [b"{}"])
    watch = RequestWatch(store, 0)
    assert watch.poll() is not None
    assert watch.number == 2


def test_a_store_that_is_away_is_an_error_of_the_poll_and_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    watch = RequestWatch(store, 0)
    ask(store, "stop", why="", clock=SYSTEM_CLOCK)
    with monkeypatch.context() as patch:

        def away(self: MemoryStore, key: str) -> int:
            raise StoreError("the store is away", kind=ErrorKind.UNREACHABLE)

        patch.setattr(MemoryStore, "size", away)
        with pytest.raises(StoreError):
            watch.poll()
    assert watch.poll() is not None


def test_the_specification_names_the_members_of_a_request() -> None:
    table = SPEC.partition("### Requests")[2].partition("\n#")[0]
    rows = re.findall(r"^\| (\w+) \|", table, re.MULTILINE)
    assert rows[1:] == [field.name for field in dataclasses.fields(Request)]
