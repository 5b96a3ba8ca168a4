"""Which of several replicas are not like the others: a pure decision.

A strict majority is right until shown otherwise; two replicas that differ show that one is wrong, and not which
(the statuses of lm-resiliency's SCOUT).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Replicas that differ: who holds them, and who is in the minority; nobody where there is no majority."""

    holders: tuple[int, ...]
    minority: tuple[int, ...]


def differences(reports: Mapping[int, Mapping[str, bytes]]) -> list[Difference]:
    """Compare what ranks have reported: by rank, a digest for each group of parameters that it holds with others."""
    groups: dict[str, dict[int, bytes]] = {}
    for rank, report in reports.items():
        for group, digest in report.items():
            groups.setdefault(group, {})[rank] = digest
    found = []
    for held in groups.values():
        counted = Counter(held.values()).most_common()
        if len(counted) > 1:
            usual, count = counted[0]
            minority = [rank for rank, digest in held.items() if digest != usual] if 2 * count > len(held) else []
            found.append(Difference(holders=tuple(sorted(held)), minority=tuple(sorted(minority))))
    return found
