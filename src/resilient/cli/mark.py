"""``resilient mark``: what a person knows of a checkpoint and no digest can tell."""

from __future__ import annotations

import click

from resilient.catalog.marks import FAILED, GOOD, USER, mark_commit
from resilient.cli.place import one_step, open_own
from resilient.cli.render import json_option, say, say_json
from resilient.clock import SYSTEM_CLOCK

_MEANING = {
    FAILED: "is marked failed: a restart goes on from an older one",
    GOOD: "is marked good: a restart may go on from it",
}


@click.command(epilog="Example: resilient mark failed runs/gpt@9000 --why 'the loss is NaN ten steps later'")
@click.argument("kind", type=click.Choice([FAILED, GOOD]))
@click.argument("run", metavar="RUN@STEP")
@click.option("--why", required=True, help="For whoever finds the mark later, and for the log of the next restart.")
@json_option
def mark(kind: str, run: str, *, why: str, as_json: bool) -> None:
    """Say of the checkpoint of RUN at STEP that whoever continues from it fails, or that it is good after all.

    A restart passes over one that is marked failed, and says so; asked for by its step, it is restored all the same.
    Retention keeps the newest one that is not. The last word counts: good takes failed away, also where the run itself
    has marked it, and the reverse.
    """
    place = open_own(run)
    commit = one_step(place, run)
    mark_commit(place.store, commit, kind, by=USER, why=why, clock=SYSTEM_CLOCK)
    if as_json:
        say_json({"run": place.url, "step": commit.step, "mark": kind, "why": why})
    else:
        say(f"step {commit.step} of {place.url} {_MEANING[kind]}")
