"""Observers: functions of others that get every event."""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from resilient.errors import ErrorKind, UsageError
from resilient.events import Event

Observer = Callable[[Event], object]


def find_observers(named: Iterable[Any]) -> tuple[Observer, ...]:
    """Return the functions that are meant: functions as they are, or ``"package.module:name"``.

    Raises:
        UsageError: kind ``invalid-setting``: one of them is nothing that can be called, or cannot be imported.
    """
    return tuple(each if callable(each) else _imported(str(each)) for each in named)


class Guarded:
    """A sink around an observer: the first exception is its last, and goes to ``failed`` instead of into the training.

    Called in the thread that reports; by several at the same time, if they do.
    """

    def __init__(self, observer: Observer, failed: Callable[[str], None]) -> None:
        self._observer = observer
        self._failed = failed
        self._off = False

    def __call__(self, event: Event) -> None:
        """Hand on one event, unless the observer has failed before."""
        if self._off:
            return
        try:
            self._observer(event)
        except Exception as error:  # noqa: BLE001 -- boundary: code of others, which training must not depend on
            self._off = True  # first: what is told now comes here, too
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self._failed(
                f"the observer {name_of(self._observer)} failed at {type(event).__name__}, and gets no more events; "
                f"training goes on: {what}"
            )


def name_of(observer: Observer) -> str:
    """Return what a person calls this function."""
    named: object = observer.func if isinstance(observer, functools.partial) else observer
    return str(getattr(named, "__qualname__", type(named).__qualname__))


def _imported(path: str) -> Observer:
    module, _, name = path.partition(":")
    if not module or module.startswith("."):
        raise _unusable(path, "it names no module by its full name")
    try:
        found: object = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise _unusable(path, str(error)) from error
    except (Exception, SystemExit) as error:  # boundary: to import is to run code of others, which may raise anything
        raise _broken(path, module, error) from error
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise _unusable(path, str(error)) from error
    if not callable(found):
        raise _unusable(path, "it cannot be called")
    return found


def _broken(path: str, module: str, error: BaseException) -> UsageError:
    frames = traceback.extract_tb(error.__traceback__)
    # That of a module that cannot be compiled ends in the import system, and its message says where.
    at = "" if isinstance(error, SyntaxError) or not frames else f" ({frames[-1].filename}, line {frames[-1].lineno})"
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return UsageError(
        f"the observer {path!r} cannot be used: importing {module} ended in {what}{at}",
        kind=ErrorKind.INVALID_SETTING,
        hint=f"mend the module (python -c 'import {module}' shows all of the error), or do without this observer",
    )


def _unusable(path: str, why: str) -> UsageError:
    return UsageError(
        f"the observer {path!r} cannot be used: {why}",
        kind=ErrorKind.INVALID_SETTING,
        hint='name a function as "package.module:function", or pass the function itself',
    )
