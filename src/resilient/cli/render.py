"""How results, progress and errors look: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import click

from resilient.errors import ResilientError
from resilient.format import sizes

F = TypeVar("F", bound=Callable[..., Any])
Progress = Callable[[int, int], None]

_COLORS: Final = {"warning": "yellow", "error": "red", "hint": "cyan"}


def json_option(command: F) -> F:
    """Add ``--json`` to a command; the command gets it as ``as_json``."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> bool:  # noqa: FBT001 -- click's signature
        ctx.meta["json"] = value  # where errors look, too
        return value

    return click.option(
        "--json", "as_json", is_flag=True, is_eager=True, callback=remember, help="Print one JSON document."
    )(command)


def say(text: str) -> None:
    """Print a line of a result."""
    click.echo(text)


def say_json(document: object) -> None:
    """Print a result as JSON."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def note(text: str, *, kind: str = "warning") -> None:
    """Print a line that is not a result; ``kind`` is ``warning``, ``error`` or ``hint``."""
    if not sys.stderr.isatty():
        click.echo(f"{kind}: {text}", err=True)
        return
    # rich and not click.style: it knows NO_COLOR, and what the terminal can do.
    from rich.console import Console  # noqa: PLC0415 -- imported when wanted, as for tables
    from rich.text import Text  # noqa: PLC0415 -- as above

    Console(stderr=True).print(Text.assemble((f"{kind}:", _COLORS[kind]), " ", text), soft_wrap=True)


def say_error(error: ResilientError, *, as_json: bool) -> None:
    """Print an error: for people on stderr, with what to do now; as JSON on stdout."""
    if as_json:
        say_json({"error": {"kind": str(error.kind), "message": str(error), "hint": error.hint}})
        return
    note(f"{error} [{error.kind}]", kind="error")
    if error.hint is not None:
        note(error.hint, kind="hint")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print rows under headings: framed on a terminal, else aligned by blanks. ``right``: columns of numbers."""
    if sys.stdout.isatty():
        _rich_table(columns, rows, right)
        return
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def _rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    # Imported when wanted: rich takes longer to import than a listing takes.
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    shown = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        shown.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(cell) for cell in row))  # Text: a name in square brackets is no markup
    Console().print(shown)


@contextmanager
def progress(what: str) -> Iterator[Progress]:
    """Show how far something is, on stderr: a bar on a terminal, else a line for each tenth."""
    if not sys.stderr.isatty():
        yield _TenthLines(what)
        return
    from rich.console import Console  # noqa: PLC0415 -- as for tables
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn  # noqa: PLC0415
    from rich.progress import Progress as Bars  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


class _TenthLines:
    """Prints a line whenever another tenth is done."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._tenths = 0

    def __call__(self, done: int, total: int) -> None:
        tenths = 10 * done // total if total else 10
        if tenths > self._tenths:
            self._tenths = tenths
            click.echo(f"{self._what}: {10 * tenths} % ({sizes.in_words(done)} of {sizes.in_words(total)})", err=True)


def moment(created: str) -> str:
    """Return an RFC 3339 time for people: to the second, in UTC; a dash for one that is not known."""
    if not created:
        return "-"
    return created.partition(".")[0].replace("T", " ").removesuffix("Z") + "Z"
