"""Which rule a record falls under."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from resilient.policy.failures.classes import FailureClass
from resilient.policy.failures.rules import Role, Rule

_MEMBERS: Final = {"patterns", "class", "role", "source", "sure"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a record says: by which rule, and by which of its lines."""

    failure: FailureClass
    role: Role
    line: str
    sure: bool


def read(lines: Iterable[str], rules: Sequence[Rule]) -> Reading | None:
    """Return what the lines of one record say, by the first rule that matches one; None if none does.

    Lines that match a rule of the role "never" are no evidence, whatever else they match.
    """
    silent = [rule for rule in rules if rule.role is Role.NEVER]
    heard = [line for line in lines if not any(_matches(rule, line) for rule in silent)]
    for rule in rules:
        if rule.role is Role.NEVER:
            continue
        found = next((line for line in heard if _matches(rule, line)), None)
        if found is not None:
            return Reading(failure=rule.failure, role=rule.role, line=found, sure=rule.sure)
    return None


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Return the rules of a TOML document with tables ``[[rule]]``.

    Each has ``class`` and ``patterns`` (a list), and may have ``role`` ("root"), ``sure`` (true) and ``source``.

    Raises:
        ValueError: it is no such document; the message names the rule.
    """
    tables = tomllib.loads(text).get("rule")
    if not isinstance(tables, list) or not tables:
        raise ValueError("it holds no [[rule]]")
    return tuple(_rule(f"rule {number}", table) for number, table in enumerate(tables, 1))


def _rule(where: str, table: Any) -> Rule:
    if not isinstance(table, dict) or not {"patterns", "class"} <= table.keys() <= _MEMBERS:
        raise ValueError(f"{where} must have a class and patterns, and may have {', '.join(sorted(_MEMBERS))}")
    patterns, sure = table["patterns"], table.get("sure", True)
    if not isinstance(patterns, list) or not all(isinstance(each, str) and each for each in patterns):
        raise ValueError(f"{where}: patterns must be a list of texts")
    if not isinstance(sure, bool):
        raise ValueError(f"{where}: sure must be true or false")  # noqa: TRY004 -- all of them are values of a file
    try:
        failure, role = FailureClass(table["class"]), Role(table.get("role", Role.ROOT))
    except ValueError as error:
        raise ValueError(f"{where}: {error}; known are {', '.join([*FailureClass, *Role])}") from error
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{where}: {pattern!r} is no regular expression: {error}") from error
    source = str(table.get("source", "a rule of the user's"))
    return Rule(failure=failure, role=role, sure=sure, source=source, patterns=tuple(patterns))


def _matches(rule: Rule, line: str) -> bool:
    return any(_compiled(pattern).search(line) is not None for pattern in rule.patterns)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
