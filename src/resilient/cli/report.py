"""``resilient report RUN``: where the time of a run went."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from resilient.cli import new_file
from resilient.cli.render import json_option, note, say, say_json
from resilient.cli.stop import whole_run
from resilient.clock import SYSTEM_CLOCK, Clock
from resilient.format import sizes
from resilient.report.account import read_ledger
from resilient.report.document import as_json as ledger_as_json
from resilient.report.model import Ledger
from resilient.store.base import Store
from resilient.store.forwarding import Forwarding

_QUIET_S = 2.0
"""How long reading may take before progress is shown, and how often it is then, where there is no terminal."""

_EXAMPLE = "--html report.html"

_WIDTH = 120  # where there is no terminal to ask


@click.command(epilog="Example: resilient report s3://bucket/runs/gpt --html gpt.html")
@click.argument("run")
@click.option("--html", "page", type=click.Path(), help="Write the report with its figures to this file.")
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there.")
@json_option
def report(run: str, *, page: str | None, overwrite: bool, as_json: bool) -> None:
    """Say where the time of RUN went: what was productive, what failed and what it cost, and what to change.

    Every rank of a run writes down what happens, beside the checkpoints. The report is made from that alone, on any
    machine, also while the run goes on. All times are wall clock of the whole job, and the parts sum to it:

    \b
      productive      compute, exchange wait, data wait, outside the loop: steps that were kept
      not productive  save stall, restore, start-up, lost work, detection, re-formation, idle

    The share of the first is the ETTR. With --html there are a timeline, the step of each rank, and machines on one
    axis with it, in one file that needs no network. --json prints all of the account.
    """  # noqa: D301 -- \b is click's mark for lines that stay as they are
    if page is not None:
        new_file.refuse(Path(page), overwrite=overwrite, example=_EXAMPLE)
    place = whole_run(run, "report")
    ledger = read_ledger(_Counting(place.store, SYSTEM_CLOCK), clock=SYSTEM_CLOCK)
    if page is not None:
        _write(Path(page), ledger, overwrite=overwrite)
    if as_json:
        say_json(ledger_as_json(ledger))
    elif page is not None:
        say(f"the report of {place.url} is in {page}")
    else:
        _show(ledger)


def _show(ledger: Ledger) -> None:
    # Imported when wanted: rich takes longer to import than --json takes.
    from rich.console import Console  # noqa: PLC0415

    from resilient.report.terminal import summary  # noqa: PLC0415

    width = None if sys.stdout.isatty() else _WIDTH
    Console(width=width, highlight=False).print(summary(ledger))


def _write(page: Path, ledger: Ledger, *, overwrite: bool) -> None:
    from resilient.report.page import render  # noqa: PLC0415 -- imported when wanted

    # What is no text, as half a character in the name of a file, is shown as what it is.
    text = render(ledger).encode("utf-8", "backslashreplace").decode("utf-8")
    new_file.write(page, text, overwrite=overwrite, example=_EXAMPLE)


class _Counting(Forwarding):
    """A store that says from time to time how much was read from it."""

    def __init__(self, inner: Store, clock: Clock) -> None:
        super().__init__(inner)
        self._clock = clock
        self._next_s = clock.monotonic() + _QUIET_S
        self._nbytes = 0

    def get(self, key: str) -> bytes:
        data = super().get(key)
        self._count(len(data))
        return data

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        super().read_into(key, start, into)
        self._count(into.nbytes)

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes
        if self._clock.monotonic() >= self._next_s:
            self._next_s = self._clock.monotonic() + _QUIET_S
            note(f"reading what the run has written down: {sizes.in_words(self._nbytes)}", kind="progress")
