"""``resilient prune``: old checkpoints deleted."""

from __future__ import annotations

from typing import Any, Literal

import click

from resilient.catalog.prune import Pruned, retained
from resilient.catalog.prune import prune as prune_run
from resilient.cli.place import nothing_committed, open_own
from resilient.cli.render import json_option, note, say, say_json
from resilient.clock import SYSTEM_CLOCK
from resilient.config import parse_duration
from resilient.errors import ErrorKind, UsageError
from resilient.format import sizes
from resilient.policy.keep import Keep


@click.command(
    epilog="Example: resilient prune runs/gpt --keep-last 3 --keep-every-time 6h --keep-best 2 --metric loss"
)
@click.argument("run")
@click.option("--keep-last", type=click.IntRange(min=1), required=True, help="Keep the newest N checkpoints.")
@click.option("--keep-every", type=click.IntRange(min=1), help="Keep all steps that are a multiple of this, too.")
@click.option("--keep-every-time", metavar="TIME", help="Keep one for each such time, too: 90min, 6h, 1d.")
@click.option("--keep-best", type=click.IntRange(min=1), help="Keep the N best by --metric, too.")
@click.option("--metric", help="What run.metrics reported, such as loss.")
@click.option("--mode", type=click.Choice(["min", "max"]), default="min", show_default=True, help="Which is the best.")
@click.option(
    "--grace",
    help="How long readers that may leave no mark have to finish, such as 90s. Default: none.",
)
@click.option("--yes", is_flag=True, help="Delete. Without it, only say what would be deleted.")
@json_option
def prune(run: str, *, grace: str | None, yes: bool, as_json: bool, **keep: Any) -> None:
    """Delete the checkpoints of RUN that are neither among the newest nor kept otherwise, and what dead writers left.

    Never deletes the newest checkpoint, nor the newest that is not marked failed, nor one that is pinned or being read,
    nor data that a checkpoint which stays shares with a deleted one. Deleted checkpoints stop counting at
    once; their data goes after --grace.
    """
    grace_s = _seconds(grace)
    policy = _policy(**keep)
    place = open_own(run)
    if place.step is not None:
        raise UsageError("prune takes a run, not one step of it", kind=ErrorKind.INVALID_ARGUMENT)
    line = place.line
    for why in line.ignored:
        note(why)
    if not line.commits:
        raise nothing_committed(place.url)
    if policy.metric is not None and not any(policy.metric in commit.metrics for commit in line.commits):
        note(f"no checkpoint has a metric {policy.metric!r}")
    kept = retained(line, policy)
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


def _policy(
    keep_last: int,
    keep_every: int | None,
    keep_every_time: str | None,
    keep_best: int | None,
    metric: str | None,
    mode: Literal["min", "max"],
) -> Keep:
    if (keep_best is None) != (metric is None):
        raise UsageError(
            "--keep-best and --metric need each other",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint="for example: --keep-best 2 --metric loss",
        )
    if keep_every_time is not None:
        try:
            parse_duration(keep_every_time)
        except ValueError as error:
            raise UsageError(
                f"--keep-every-time {keep_every_time!r} {error}", kind=ErrorKind.INVALID_ARGUMENT
            ) from error
    return Keep(last=keep_last, every=keep_every, every_time=keep_every_time, best=keep_best, metric=metric, mode=mode)


def _say(done: Pruned, staying: list[int], *, yes: bool) -> None:
    verb = "deleted" if yes else "would delete"
    say(f"{verb} {_steps(done.steps)} ({sizes.in_words(done.nbytes)})" if done.steps else f"{verb} no checkpoint")
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
