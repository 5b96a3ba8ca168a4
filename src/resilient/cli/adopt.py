"""``resilient adopt``: a save that is complete and was never committed."""

from __future__ import annotations

import click

from resilient.catalog.adopt import adopt as adopt_attempt
from resilient.cli.place import asked_step, open_own
from resilient.cli.render import json_option, progress, say, say_json
from resilient.clock import SYSTEM_CLOCK
from resilient.format import sizes


@click.command(epilog="Example: resilient adopt runs/gpt@9000")
@click.argument("run", metavar="RUN@STEP")
@json_option
def adopt(run: str, *, as_json: bool) -> None:
    """Commit the save of RUN at STEP that is complete, and whose writers died before they could.

    `resilient fsck RUN` lists what is complete and uncommitted. Every stored byte is compared first. Refused if a
    rank's part is missing, if the run has gone on from an earlier step since, or while its writers may be alive.
    """
    place = open_own(run)
    step = asked_step(place, run)
    with progress("verified") as watch:
        commit = adopt_attempt(place.store, step, clock=SYSTEM_CLOCK, progress=watch)
    if as_json:
        found = {"run": place.url, "step": step, "generation": commit.generation, "nbytes": commit.nbytes}
        say_json(found | {"world_size": commit.world_size, "items": list(commit.items)})
    else:
        say(f"{commit.attempt} of {place.url} is committed ({sizes.in_words(commit.nbytes)}, verified)")
