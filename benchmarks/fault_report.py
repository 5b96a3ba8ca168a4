"""The fault matrix as Markdown: one table of outcomes, then what was measured, fault by fault."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_INTRODUCTION = """\
# Fault matrix

Made by `python benchmarks/fault_matrix.py`. {date}, {machine}; {size} run, seed {seed}. {versions}.

The same faults are done to every system: real processes (two ranks, gloo), real kills, a real full disk, a real S3
server behind a proxy that refuses requests. Afterwards new processes restore as that system restarts, and every element
is compared. Systems that can be told a deadline are told the same one. Nothing in the tables is from elsewhere: each
cell is what this run saw, on this machine, once or a few times; a race that was not lost here may be lost elsewhere.

`Lightning-style` and `HF-style` are not those libraries: they are what their documentation says about which files are
written, in which order, and which is taken to resume, on `torch.save`. `torch.save + rename` is the usual recipe: a
temporary file, `fsync`, `rename`. DCP's newest step is the highest number that has its `.metadata`.

| outcome | what it says |
| --- | --- |
| holds | a restart comes back by itself with a right state: what was reported saved, or the older if damaged |
| error only at load | a restart fails, again and again, until somebody asks for an older step by hand, which loads |
| cannot save again | the older state comes back, but nothing more could be saved before a restart |
| hangs | no answer by the deadline that is named |
| lost the older state | a state that had been reported saved does not come back |
| silent wrong state | a state comes back without an error that nobody saved |
| runs the code | restoring ran code that had been planted in the files |
"""


def render(lines: Sequence[dict[str, Any]]) -> str:
    """Return the whole page."""
    head = lines[0]
    cells = {(line["fault"], line["system"]): line for line in lines if "fault" in line}
    faults = list(dict.fromkeys(fault for fault, _ in cells))
    systems = list(dict.fromkeys(system for _, system in cells))
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    parts = [_INTRODUCTION.format(**{**head, "versions": versions}), "## Outcomes\n"]
    parts.append(
        _table(
            ("fault", *systems), ((fault, *(_cell(cells.get((fault, each))) for each in systems)) for fault in faults)
        )
    )
    parts.append("## What was measured\n")
    for fault in faults:
        parts.append(f"### {fault[0].upper()}{fault[1:]}\n")
        found = [cells[fault, each] for each in systems if (fault, each) in cells]
        parts.append(
            _table(
                ("system", "outcome", "detail"),
                ((each["system"], _cell(each), _code(each["detail"])) for each in found),
            )
        )
    return "\n".join(parts)


def _cell(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    plain = line["outcome"] in ("holds", "not applicable", "not installed", "not measured")
    return str(line["outcome"]) if plain else f"**{line['outcome']}**"


def _code(detail: str) -> str:
    return detail.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
