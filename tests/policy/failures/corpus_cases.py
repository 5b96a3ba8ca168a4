"""The corpus: what processes have said when they failed, each with what began it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilient.policy.failures.rules import Role
from resilient.policy.failures.verdict import Account, explain, reading_of

FOLDER = Path(__file__).parent / "corpus"
SECONDARY = "secondary"


@dataclass(frozen=True, kw_only=True)
class Case:
    """``at_first``: what the rules made of it before they were amended, if that was something else."""

    file: str
    number: int
    expected: str
    said: Account
    at_first: str | None

    def __str__(self) -> str:
        return f"{self.file} {self.number}: {self.said.lines[0][:60]}"

    @property
    def found(self) -> str:
        if reading_of(self.said).role is Role.SECONDARY:
            return SECONDARY
        return str(explain([self.said], expected=1).failure)


def cases(file: str) -> Iterator[Case]:
    for number, each in enumerate(tomllib.loads((FOLDER / f"{file}.toml").read_text())["case"], 1):
        yield Case(file=file, number=number, expected=each["class"], said=_account(each), at_first=each.get("at_first"))


def _account(case: dict[str, Any]) -> Account:
    seen = case["lines"][0].startswith("process ended")
    return Account(
        rank=0,
        host="a",
        lines=tuple(case["lines"]),
        context=tuple(case.get("context", ())),
        wall_s=0.0,
        monotonic_s=0.0,
        clock="boot",
        own=not seen,
        place="" if seen else "train.py:1",
        oom=case.get("oom", False),
    )
