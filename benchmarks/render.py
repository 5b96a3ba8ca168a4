"""Figures as Markdown: first what was to be reached, then everything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from measuring import Figure
from targets import OURS, TARGETS, Target, name_of

_INTRODUCTION = """\
# Benchmarks

Made by `python benchmarks/run_all.py` (`make bench` for a quick one). {date}, {machine}; {size} run of {minutes:.0f}
minutes. {versions}.

How to read it: every figure is the median of the number of values that stands beside it, with the smallest and the
largest. What is compared was measured in the same run, in turns, in fresh processes. Seconds and GiB/s are those of
this machine, ratios are what carries over. Processor time is that of all processes of a contestant; what the kernel
spends on writing out the page cache is in nobody's, which favors those that write through it. Each save was read back
in part and compared; where that failed there is no figure. "Durable" means flushed to the disk: where a library leaves
that to the page cache, the flush is done for it and counted.
"""


def render(head: dict[str, Any], figures: Sequence[Figure], profile: str | None) -> str:
    """Return the whole page."""
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    parts = [_INTRODUCTION.format(**{**head, "versions": versions})]
    if head["failed"]:
        parts.append(f"**Failed, and not in the tables: {', '.join(head['failed'])}.**\n")
    parts.append("## What was to be reached\n")
    parts.append(_table(_TARGET_HEAD, _target_rows(figures)))
    by_benchmark: defaultdict[str, list[Figure]] = defaultdict(list)
    for figure in figures:
        by_benchmark[figure.benchmark].append(figure)
    for benchmark, all_of_it in by_benchmark.items():
        parts.append(f"## All figures: {benchmark.replace('_', ' ')}\n")
        parts.append(_table(("case", "metric", "median", "from - to", "of"), map(_figure_row, all_of_it)))
    if profile:
        parts.append(f"## Where the time goes\n\n{profile}")
    return "\n".join(parts)


_TARGET_HEAD = ("", "what", "case", "target", "reached", "from - to", "", "in its own unit", "best peer", "machine")


def _target_rows(figures: Sequence[Figure]) -> Iterable[tuple[str, ...]]:
    for target in sorted(TARGETS, key=lambda each: each.number):
        for figure in figures:
            if target.matches(figure):
                yield _target_row(target, figure, figures)


def _target_row(target: Target, figure: Figure, figures: Sequence[Figure]) -> tuple[str, ...]:
    own, peer = target.own(figure, figures), target.best_peer(figure, figures)
    machine = target.machine(figure, figures)
    return (
        str(target.number),
        target.what,
        figure.case.removeprefix(f"{OURS}, "),
        f"{target.sense} {target.bound:g}",
        f"**{figure.value:g}**",
        _range(figure),
        "yes" if target.reached(figure) else "**no**",
        _valued(own),
        f"{_valued(peer)} ({name_of(peer, figure) or peer.case})" if peer else "",
        f"{_valued(machine)} ({_limit(machine, figure)})" if machine else "",
    )


def _limit(machine: Figure, figure: Figure) -> str:
    name = name_of(machine, figure)
    return f"{name}: {machine.metric}" if name and name.startswith("raw") else machine.metric


def _figure_row(figure: Figure) -> tuple[str, ...]:
    return figure.case, figure.metric, _valued(figure), _range(figure), str(figure.median_of)


def _valued(figure: Figure | None) -> str:
    if figure is None:
        return ""
    return f"{figure.value:g}" if figure.unit == "ratio" else f"{figure.value:g} {figure.unit}"


def _range(figure: Figure) -> str:
    low, high = figure.range
    return "" if figure.median_of == 1 else f"{low:g} - {high:g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
