"""What a check of a node has found."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Status(StrEnum):
    """How a check ended. ``SLOW`` works, and worse than it should; ``SKIPPED`` could not be looked at, and says why."""

    OK = "ok"
    SLOW = "slow"
    FAILED = "failed"
    SKIPPED = "skipped"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One finding about one node.

    ``line`` says what was found, ``remedy`` what to do now (empty where nothing is to be done). ``figure`` and
    ``limit`` are in ``unit``. ``subject``: which device, core or place, where a check looks at several.
    ``doubtful``: a failure that may be no fault of the node: the check itself could not be made, or did not end, or a
    job may have been given only a part of the node.
    """

    name: str
    status: Status
    line: str
    remedy: str = ""
    subject: str = ""
    figure: float | None = None
    unit: str = ""
    limit: float | None = None
    node: str = ""
    duration_s: float = 0.0
    doubtful: bool = False


def skipped(name: str, why: str, *, subject: str = "") -> Result:
    """Return that something could not be looked at."""
    return Result(name=name, status=Status.SKIPPED, line=why, subject=subject)


def failed(name: str, line: str, remedy: str, *, subject: str = "", doubtful: bool = False) -> Result:
    """Return a failure that no figure belongs to."""
    return Result(name=name, status=Status.FAILED, line=line, remedy=remedy, subject=subject, doubtful=doubtful)


def passed(name: str, line: str, *, subject: str = "") -> Result:
    """Return that all is well, where no figure belongs to it."""
    return Result(name=name, status=Status.OK, line=line, subject=subject)


def at_least(result: Result, *, slow_line: str, remedy: str) -> Result:
    """Return ``result`` as it is, or as slow if its figure is below its limit."""
    if result.figure is None or result.limit is None or result.figure >= result.limit:
        return result
    return msgspec.structs.replace(result, status=Status.SLOW, line=slow_line, remedy=remedy)


def worst(results: list[Result]) -> Status:
    """Return the worst of several ends; what was skipped is no fault."""
    found = {each.status for each in results}
    for status in (Status.FAILED, Status.SLOW):
        if status in found:
            return status
    return Status.OK
