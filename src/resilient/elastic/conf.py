"""What ``--rdzv-conf`` of torchrun sets for this backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from resilient.config import parse_duration
from resilient.errors import ErrorKind, UsageError

_OF_TORCHRUN: Final = frozenset({"timeout", "rank"})
"""What torchrun adds of its own accord, for its own backends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conf:
    """How long to wait for what: numbers are seconds, text has a unit (``join_timeout=10min``)."""

    join_timeout: float = 600.0  # for a round to come about
    last_call_timeout: float = 5.0  # for more nodes, once there are enough
    survivors_timeout: float = 60.0  # for members that live to stop their workers and come back
    resize_timeout: float = 120.0  # for workers to save and park before they are restarted with more or fewer nodes
    deaf_timeout: float = 5.0  # the same for workers that have not looked in the first resize_timeout of their round
    ping_timeout: float = 2.5  # for an agent's sign of life
    poll_interval: float = 2.0  # between two looks at the store while training goes on
    exit_timeout: float = 300.0  # for the other nodes to finish
    is_host: bool = False  # serve an endpoint HOST:PORT here, although that name does not lead to this machine
    check: str = "off"  # "light": examine this node before it joins and after each attempt, and stay out if it is unfit
    check_command: bool = True  # refuse a node that runs another script, or the same with other arguments


def read_conf(given: Mapping[str, Any]) -> Conf:
    """Return the settings that hold.

    Raises:
        UsageError: an unknown name, or a value that is none.
    """
    known = {each.name: each.default for each in fields(Conf)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in _OF_TORCHRUN:
            continue
        if name not in known:
            raise UsageError(
                f"--rdzv-conf: {name!r} is no setting of the backend 'resilient'",
                kind=ErrorKind.INVALID_SETTING,
                hint=f"its settings are {', '.join(known)}",
            )
        try:
            values[name] = _PARSERS[type(known[name])](value)
        except ValueError as error:
            raise UsageError(f"--rdzv-conf: {name} is {value!r}: it {error}", kind=ErrorKind.INVALID_SETTING) from error
    return Conf(**values)


def _level(value: object) -> str:
    if value not in ("off", "light"):
        raise ValueError("must be off or light")
    return str(value)


def _flag(value: object) -> bool:
    text = str(value).lower()
    if text not in {"0", "1", "true", "false"}:
        raise ValueError("must be 0 or 1")
    return text in {"1", "true"}


def _duration(value: object) -> float:
    text = str(value)
    try:
        return parse_duration(float(text))
    except ValueError:
        return parse_duration(text)


_PARSERS: Final[Mapping[type, Callable[[object], object]]] = {bool: _flag, str: _level, float: _duration}
