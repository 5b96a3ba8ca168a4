"""``resilient ls``: which checkpoints a run has."""

from __future__ import annotations

from typing import Any

import click

from resilient.cli.place import Place, nothing_committed, open_place
from resilient.cli.render import json_option, moment, note, say_json, table
from resilient.errors import ErrorKind, UsageError
from resilient.format import sizes
from resilient.format.documents import Commit


@click.command(epilog="Example: resilient ls s3://bucket/runs/gpt --json")
@click.argument("run")
@json_option
def ls(run: str, *, as_json: bool) -> None:
    """List the committed checkpoints of RUN, newest first.

    Only what the newest generation continues is listed: not what was rolled back, and nothing unfinished.
    """
    place = open_place(run)
    if place.step is not None:
        raise UsageError(
            "ls lists all steps of a run", kind=ErrorKind.INVALID_ARGUMENT, hint=f"resilient show {run} shows one"
        )
    for why in place.line.ignored:
        note(why)
    if not place.line.commits:
        if place.line.ignored:
            place.chosen()  # raises: there were checkpoints
        raise nothing_committed(place.url)
    if as_json:
        say_json({"run": place.url, "checkpoints": [describe(place, commit) for commit in place.line.commits]})
        return
    table(
        ("step", "generation", "created", "size", "world size", "items", "marks"),
        [
            (
                str(commit.step),
                str(commit.generation),
                moment(commit.created),
                sizes.in_words(commit.nbytes),
                str(commit.world_size),
                ", ".join(commit.items),
                ", ".join(place.line.marks.get(commit.attempt, ())),
            )
            for commit in place.line.commits
        ],
        right=("step", "generation", "size", "world size"),
    )


def describe(place: Place, commit: Commit) -> dict[str, Any]:
    """Return a checkpoint as JSON shows it."""
    return {
        "step": commit.step,
        "generation": commit.generation,
        "created": commit.created,
        "nbytes": commit.nbytes,
        "world_size": commit.world_size,
        "items": list(commit.items),
        "marks": list(place.line.marks.get(commit.attempt, ())),
    }
