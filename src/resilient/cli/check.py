"""``resilient check``: whether this node, and the nodes beside it, are fit for training."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from resilient.check import reference as references
from resilient.check.across import NAME as PAIRS
from resilient.check.across import run_pairs
from resilient.check.context import Level
from resilient.check.limits import Limits
from resilient.check.result import Result, Status, worst
from resilient.check.suite import CHECKS, Progress, run_checks
from resilient.cli.render import json_option, note, say, say_json, table
from resilient.config import Process, read_process

NAMES: Final = tuple(check.name for check in CHECKS)
EXIT_CODES: Final = {Status.OK: 0, Status.SLOW: 3, Status.FAILED: 4}

_WORST_FIRST: Final = (Status.FAILED, Status.SLOW, Status.OK, Status.SKIPPED)


@click.command(
    epilog="Example: torchrun --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 --no-python "
    "resilient check --level full --place s3://bucket/run"
)
@click.option(
    "--level", type=click.Choice(["light", "full"]), default="light", show_default=True, help="How thoroughly."
)
@click.option("--place", "places", metavar="DIR|URL", multiple=True, help="Where checkpoints go; may be repeated.")
@click.option(
    "--reference",
    type=click.Path(path_type=Path),
    help="What an earlier check of this node printed with --json: it should be about as fast.",
)
@click.option("--only", type=click.Choice([*NAMES, PAIRS]), multiple=True, help="Some checks alone; may be repeated.")
@json_option
@click.pass_context
def check(
    ctx: click.Context,
    level: Level,
    places: tuple[str, ...],
    reference: Path | None,
    only: tuple[str, ...],
    *,
    as_json: bool,
) -> None:
    """Check whether this node is fit for training.

    Looks at processor, memory, disks, stores, network, clock and accelerators: at most 60 s (light) or 10 min (full).
    Started by torchrun on several nodes, --level full also tests them in pairs, and names the node that is bad or
    slow; node 0 reports for all. Exit codes: 0 healthy, 3 something is slow, 4 something failed (on any node).
    """
    process = read_process()
    if process.local_rank:
        return  # one process looks at a node
    recorded = references.read(reference) if reference is not None else []
    nodes = max(1, process.world_size // process.local_world_size)
    with progress_of(nodes) as progress:
        checks = [check for check in CHECKS if not only or check.name in only]
        results = run_checks(level, places=places, progress=progress, checks=checks)
        results = references.compared(results, recorded, Limits())
        end = worst(results)
        if nodes > 1 and (PAIRS in only or (level == "full" and not only)):
            progress(PAIRS, len(checks), len(checks))
            results, end = run_pairs(
                results, node=node_of(process), nodes=nodes, master=process.master, job=process.elastic_id
            )
    if as_json:
        say_json({"status": str(end), "level": level, "results": msgspec.to_builtins(results)})
    else:
        show(results, several=nodes > 1)
    ctx.exit(EXIT_CODES[end])


def node_of(process: Process) -> int:
    """Return which node this is, where all have the same number of workers."""
    return process.rank // process.local_world_size


def show(results: Sequence[Result], *, several: bool) -> None:
    """Print a table, then what to do, worst first."""
    columns = ("result", *(("node",) if several else ()), "check", "figure", "limit", "what was found")
    rows = [
        (
            str(each.status),
            *((each.node,) if several else ()),
            each.name,
            _number(each.figure, each.unit),
            _number(each.limit, each.unit),
            f"{each.subject}: {each.line}" if each.subject and each.subject not in each.line else each.line,
        )
        for each in sorted(results, key=lambda each: _WORST_FIRST.index(each.status))
    ]
    table(columns, rows, right=("figure", "limit"))
    bad = [each for each in results if each.status in {Status.FAILED, Status.SLOW}]
    names = {each.node for each in results}
    what = "the nodes are" if several and len(names) > 1 else f"{socket.gethostname()} is"
    if not bad:
        say(f"{what} fit for training")
        return
    for each in bad:
        where = f"{each.node}: " if several else ""
        subject = f"{each.subject}: " if each.subject and each.subject not in each.line else ""
        note(f"{where}{each.name}: {subject}{each.line}", kind="error" if each.status is Status.FAILED else "warning")
        note(each.remedy, kind="hint")


def _number(figure: float | None, unit: str) -> str:
    return "" if figure is None else f"{figure:,.3g} {unit}" if abs(figure) < 1000 else f"{figure:,.0f} {unit}"


@contextmanager
def progress_of(nodes: int) -> Iterator[Progress]:
    """Show which check runs, on stderr: one line that changes on a terminal; nothing elsewhere but between nodes."""
    if not sys.stderr.isatty():
        yield _quiet
        return
    from rich.console import Console  # noqa: PLC0415 -- imported when wanted: it takes long

    with Console(stderr=True).status("starting") as status:

        def tell(name: str, done: int, total: int) -> None:
            status.update(f"{name} ({done} of {total} checks done{f', {nodes} nodes' if nodes > 1 else ''})")

        yield tell


def _quiet(*_: Any) -> None:
    """Say nothing: a check is over before a line for each part would help anybody who reads a log."""
