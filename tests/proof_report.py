"""Render docs/proof.md from the figures that `make proof` left in build/proof.

Run as ``python -m tests.proof_report docs/proof.md``.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tests.figures import Figure, titled

FIGURES = Path("build/proof")
_HEAD = """# Proof

What `make proof` measured: every proof with its full count. `make test` runs them with small counts.
"""
_SECTION = re.compile(r"^(## .+\n\n`([^`]+)`, (?:(?!## ).*\n)+)", re.MULTILINE)


def render(folder: Path, before: str = "") -> str:
    """Return the page: one section a proof, one line a figure.

    ``before`` is the page as it was: what it has of proofs that left no figures this time stays, with its date.
    """
    sections = {stem: text.rstrip("\n") + "\n" for text, stem in _SECTION.findall(before)}
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    measured = f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, torch {version('torch')}, {machine}"
    for path in folder.glob("*.jsonl"):
        title, rounds = titled(path)
        count = f"{len(rounds)} round{'s' * (len(rounds) != 1)}"
        sections[path.stem] = f"## {title}\n\n`{path.stem}`, {count}; {measured}.\n\n{_table(rounds)}"
    return "\n".join([_HEAD, *(sections[stem] for stem in sorted(sections))])


def _table(rounds: Sequence[dict[str, Figure]]) -> str:
    names = list(dict.fromkeys(name for each in rounds for name in each))
    rows = [f"| {name} | {_summary([each[name] for each in rounds if name in each])} |" for name in names]
    return "\n".join(["| figure | value |", "|---|---|", *rows]) + "\n"


def _summary(values: Sequence[Figure]) -> str:
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) == len(values):
        if len(set(numbers)) == 1:
            return f"{numbers[0]:g}"
        return f"min {min(numbers):g}, median {statistics.median(numbers):g}, max {max(numbers):g}"
    counts = Counter(str(value) for value in values)
    return ", ".join(f"{value}: {times}" for value, times in counts.most_common(12))


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(render(FIGURES, page.read_text() if page.exists() else ""))
