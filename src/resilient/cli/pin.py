"""``resilient pin`` and ``unpin``: a checkpoint that is never deleted."""

from __future__ import annotations

import click

from resilient.catalog.marks import PINNED, USER, mark_commit, remove_marks
from resilient.cli.place import one_step, open_own
from resilient.cli.render import json_option, note, say, say_json
from resilient.clock import SYSTEM_CLOCK


@click.command(epilog="Example: resilient pin runs/gpt@9000 --why 'released as v2'")
@click.argument("run", metavar="RUN@STEP")
@click.option("--why", default="", help="For whoever finds the pin later.")
@json_option
def pin(run: str, *, why: str, as_json: bool) -> None:
    """Keep the checkpoint of RUN at STEP: neither retention nor prune deletes it until it is unpinned."""
    place = open_own(run)
    commit = one_step(place, run)
    mark_commit(place.store, commit, PINNED, by=USER, why=why, clock=SYSTEM_CLOCK)
    if as_json:
        say_json({"run": place.url, "step": commit.step, "pinned": True})
    else:
        say(f"step {commit.step} of {place.url} is pinned")


@click.command(epilog="Example: resilient unpin runs/gpt@9000")
@click.argument("run", metavar="RUN@STEP")
@json_option
def unpin(run: str, *, as_json: bool) -> None:
    """Let the checkpoint of RUN at STEP be deleted again, as any other."""
    place = open_own(run)
    commit = one_step(place, run)
    removed = remove_marks(place.store, commit.attempt, PINNED)
    if as_json:
        say_json({"run": place.url, "step": commit.step, "pinned": False, "removed": removed})
        return
    if not removed:
        note(f"step {commit.step} was not pinned")
    say(f"step {commit.step} of {place.url} is not pinned")
