from __future__ import annotations

import re
from pathlib import Path

import pytest

from resilient import events
from resilient.errors import ErrorKind, UsageError
from resilient.observe.hook import Guarded, find_observers


def broken(event: events.Event) -> None:
    raise ValueError(event.rank)


def test_an_observer_that_raises_is_told_once_and_the_others_go_on() -> None:
    bus, seen = events.Bus(), list[events.Event]()
    calls = []

    def counting(event: events.Event) -> None:
        calls.append(event)
        broken(event)

    def say(message: str) -> None:
        bus.emit(events.Notice(message=message))

    bus.subscribe(Guarded(counting, say))
    bus.subscribe(Guarded(seen.append, say))
    first, second = events.Notice(rank=7, message="a"), events.Notice(message="b")
    bus.emit(first)
    bus.emit(second)
    assert calls == [first]
    told = [each.message for each in seen if isinstance(each, events.Notice) and each not in (first, second)]
    assert len(told) == 1
    assert "counting failed at Notice" in told[0]
    assert "ValueError: 7" in told[0]
    assert [each for each in seen if each in (first, second)] == [first, second]


def test_what_ends_a_process_is_not_held_up() -> None:
    def leave(_: events.Event) -> None:
        raise SystemExit(3)

    bus = events.Bus()
    bus.subscribe(Guarded(leave, lambda _: None))
    with pytest.raises(SystemExit):
        bus.emit(events.Notice(message="a"))


def test_observers_are_functions_or_their_names() -> None:
    seen: list[events.Event] = []
    assert find_observers([seen.append, "builtins:print", "os:path.join"])[1:] == (print, __import__("os").path.join)


@pytest.mark.parametrize("name", ["no_such_module:f", "os:no_such_name", "os:sep", ".x:y", ":f", "", "os"])
def test_a_name_that_means_nothing_is_an_error_at_once(name: str) -> None:
    with pytest.raises(UsageError, match=re.escape(repr(name))) as caught:
        find_observers([name])
    assert caught.value.kind is ErrorKind.INVALID_SETTING
    assert caught.value.hint


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f(:", r"SyntaxError: .*hook_0\.py, line 1\)\n"),
        ("x = 1\nraise RuntimeError('no key')", r"RuntimeError: no key \(.*hook_1\.py, line 2\)\n"),
        ("import sys\nsys.exit(3)", r"SystemExit: 3 \(.*hook_2\.py, line 2\)\n"),
        ("from os import no_such_name", r"ImportError: cannot import name.*\(.*hook_3\.py, line 1\)\n"),
    ],
)
def test_a_module_that_cannot_be_imported_is_an_error_that_says_where(
    source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = ["def", "x =", "imp", "fro"].index(source[:3])  # a name of its own: modules are imported once
    (tmp_path / f"broken_hook_{number}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=f"'broken_hook_{number}:f' cannot be used: .*{said}") as caught:
        find_observers([f"broken_hook_{number}:f"])
    assert caught.value.kind is ErrorKind.INVALID_SETTING
    assert f"broken_hook_{number}" in str(caught.value.hint)
