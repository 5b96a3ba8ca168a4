"""``resilient prune``: old checkpoints deleted."""

from __future__ import annotations

import click

from resilient.catalog.prune import Pruned
from resilient.catalog.prune import prune as prune_run
from resilient.cli.place import nothing_committed, open_place
from resilient.cli.render import json_option, note, say, say_json, size
from resilient.clock import SYSTEM_CLOCK
from resilient.config import parse_duration
from resilient.errors import ErrorKind, UsageError
from resilient.policy.keep import Keep


@click.command(epilog="Example: resilient prune runs/gpt --keep-last 3 --keep-every 1000 --yes")
@click.argument("run")
@click.option("--keep-last", type=click.IntRange(min=1), required=True, help="Keep the newest N checkpoints.")
@click.option("--keep-every", type=click.IntRange(min=1), help="Keep all steps that are a multiple of this, too.")
@click.option(
    "--grace",
    help="How long readers that may leave no mark have to finish, such as 90s. Default: none.",
)
@click.option("--yes", is_flag=True, help="Delete. Without it, only say what would be deleted.")
@json_option
def prune(run: str, *, keep_last: int, keep_every: int | None, grace: str | None, yes: bool, as_json: bool) -> None:
    """Delete the checkpoints of RUN that are neither among the newest nor kept otherwise, and what dead writers left.

    Never deletes the newest checkpoint, nor one that is pinned or being read. Deleted checkpoints stop counting at
    once; their data goes after --grace.
    """
    grace_s = _seconds(grace)
    place = open_place(run)
    if place.step is not None:
        raise UsageError("prune takes a run, not one step of it", kind=ErrorKind.INVALID_ARGUMENT)
    line = place.line
    for why in line.ignored:
        note(why)
    if not line.commits:
        raise nothing_committed(place.url)
    kept = Keep(last=keep_last, every=keep_every).kept([commit.step for commit in line.commits])
    done = prune_run(
        place.store, line, kept, clock=SYSTEM_CLOCK, dry_run=not yes, grace_s=grace_s if yes else None, watch=yes
    )
    staying = [commit.step for commit in line.commits if commit.step not in done.steps]
    if as_json:
        say_json(
            {
                "run": place.url,
                "deleted": yes,
                "steps": list(done.steps),
                "kept": staying,
                "held": [{"step": held.step, "why": held.why} for held in done.held],
                "debris": done.debris,
                "nbytes": done.nbytes,
            }
        )
        return
    _say(done, staying, yes=yes)


def _say(done: Pruned, staying: list[int], *, yes: bool) -> None:
    verb = "deleted" if yes else "would delete"
    say(f"{verb} {_steps(done.steps)} ({size(done.nbytes)})" if done.steps else f"{verb} no checkpoint")
    if done.debris:
        say(f"{verb} what {done.debris} unfinished or rolled-back saves left")
    for held in done.held:
        say(f"keeping step {held.step}, which is {held.why}")
    say(f"keeping {_steps(staying)}")
    if not yes and (done.steps or done.debris):
        say("nothing was changed: --yes deletes")


def _steps(steps: list[int] | tuple[int, ...]) -> str:
    ordered = sorted(steps)
    shown = ", ".join(map(str, ordered[:10]))
    more = f", ... ({len(ordered)} in all)" if len(ordered) > 10 else ""
    return f"{'step' if len(ordered) == 1 else 'steps'} {shown}{more}"


def _seconds(grace: str | None) -> float:
    if grace is None:
        return 0.0
    try:
        return parse_duration(grace)
    except ValueError as error:
        raise UsageError(f"--grace {grace!r} {error}", kind=ErrorKind.INVALID_ARGUMENT) from error
