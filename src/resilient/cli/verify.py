"""``resilient verify``: whether what is stored is what was written."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict

import click

from resilient.catalog.verify import Bad, Verification
from resilient.catalog.verify import verify as verify_commits
from resilient.cli.place import Place, nothing_committed, open_place
from resilient.cli.render import json_option, note, progress, say, say_json
from resilient.errors import CorruptError

_SHALLOW = " (documents and sizes; --deep reads the data)"


@click.command(epilog="Example: resilient verify runs/gpt --deep")
@click.argument("run", metavar="RUN[@STEP]")
@click.option("--deep", is_flag=True, help="Read all data, too; without it, documents and sizes only.")
@json_option
@click.pass_context
def verify(ctx: click.Context, run: str, *, deep: bool, as_json: bool) -> None:
    """Compare the checkpoints of RUN, or that of STEP, with the digests written when they were saved.

    Whatever is damaged is listed by the name of its object; the exit code is then 12.
    """
    place = open_place(run, even_damaged=True)
    found = _verify(place, deep=deep)
    if as_json:
        say_json({"ok": found.ok, "checked": found.checked, "bad": [asdict(bad) for bad in found.bad]})
    else:
        for bad in found.bad:
            say(f"bad: {bad_line(bad)}")
        outcome = "ok" if found.ok else f"{len(found.bad)} bad"
        say(f"{outcome}: {found.checked} objects checked{'' if deep else _SHALLOW}")
    if not found.ok:
        ctx.exit(CorruptError.exit_code)


def _verify(place: Place, *, deep: bool) -> Verification:
    line = place.line
    if place.step is None:
        commits = line.commits
        for attempt in line.uncommitted:
            note(
                f"{attempt} is complete but uncommitted: its writer was stopped, or {attempt.commit} was lost"
                f" (resilient adopt {place.url}@{attempt.step} commits it)"
            )
    else:
        torn = next((attempt for attempt in line.torn if attempt.step == place.step), None)
        if torn is not None:
            bad = Bad(step=torn.step, object=torn.commit, why="is torn or not what was written")
            return Verification(checked=1, bad=(bad,))
        commits = (line.at(place.step),)
    with progress("verified") if deep else nullcontext() as watch:
        found = verify_commits(
            place.store, commits, deep=deep, progress=watch, line=line if place.step is None else None
        )
    if found.ok and not commits:
        raise nothing_committed(place.url)
    return found


def bad_line(bad: Bad) -> str:
    """Return what is wrong with one object, as a line for people."""
    where = "" if bad.step is None else f"step {bad.step}: "
    notes = [f"tensor {bad.tensor}"] if bad.tensor else []
    if bad.rank is not None:
        notes.append(f"rank {bad.rank}")
    return f"{where}{bad.object} {bad.why}" + (f" ({', '.join(notes)})" if notes else "")
