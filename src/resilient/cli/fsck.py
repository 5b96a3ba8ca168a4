"""``resilient fsck``: what lies in a run, what is damaged, and what would be lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict

import click

from resilient.catalog.inventory import Apart, Inventory, Loss, take_inventory
from resilient.catalog.verify import Verification
from resilient.catalog.verify import verify as verify_commits
from resilient.cli.place import Place, open_own
from resilient.cli.render import json_option, note, progress, say, say_json, table
from resilient.cli.verify import bad_line
from resilient.errors import CorruptError, ErrorKind, UsageError
from resilient.format import sizes

_SHOWN = 20


@click.command(epilog="Example: resilient fsck runs/gpt --deep")
@click.argument("run")
@click.option("--deep", is_flag=True, help="Read all data, too; without it, documents and sizes only.")
@json_option
@click.pass_context
def fsck(ctx: click.Context, run: str, *, deep: bool, as_json: bool) -> None:
    """Take stock of RUN: what lies there, what of it is damaged, and what depends on what.

    \b
    Kinds of objects:
      run         of the run as a whole, its generations and launches
      committed   of checkpoints that count
      referenced  data of deleted checkpoints that others share, and which stays for them
      unfinished  of saves that may be under way, or wait to be committed (see resilient adopt)
      torn        of checkpoints whose COMMIT is damaged: they do not count
      orphaned    of saves that can never count: resilient prune removes them
      unknown     of something else; never touched

    Changes nothing. Ends with exit code 12 if anything that counts is damaged.
    """  # noqa: D301 -- \b is click's mark for lines that stay as they are
    place = open_own(run, even_damaged=True)
    if place.step is not None:
        raise UsageError(
            "fsck takes a run, not one step of it",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint=f"resilient verify {run} looks at one",
        )
    line = place.line
    with progress("verified") if deep else nullcontext() as watch:
        found = verify_commits(place.store, line.commits, deep=deep, progress=watch, line=line)
    inventory = take_inventory(place.store, line)
    ok = found.ok and not line.ignored
    if as_json:
        _say_json(place, inventory, found, ok=ok)
    else:
        _say(place, inventory, found, deep=deep)
    if not ok:
        ctx.exit(CorruptError.exit_code)


def _say_json(place: Place, inventory: Inventory, found: Verification, *, ok: bool) -> None:
    say_json(
        {
            "run": place.url,
            "ok": ok,
            "kinds": {kind: asdict(amount) for kind, amount in inventory.amounts.items()},
            "steps": [commit.step for commit in place.line.commits],
            "apart": [
                {
                    "step": one.attempt.step,
                    "generation": one.attempt.generation,
                    "kind": one.kind,
                    "complete": one.complete,
                    **asdict(one.amount),
                }
                for one in inventory.apart
            ],
            "losses": [
                {
                    "step": loss.attempt.step,
                    "generation": loss.attempt.generation,
                    "takes": list(loss.takes),
                    "left": loss.left,
                }
                for loss in inventory.losses
            ],
            "unknown": list(inventory.unknown),
            "ignored": list(place.line.ignored),
            "bad": [asdict(bad) for bad in found.bad],
        }
    )


def _say(place: Place, inventory: Inventory, found: Verification, *, deep: bool) -> None:
    for why in place.line.ignored:
        note(why)
    amounts = inventory.amounts.items()
    rows = [(kind, str(amount.objects), sizes.in_words(amount.nbytes)) for kind, amount in amounts if amount.objects]
    table(("kind", "objects", "size"), rows, right=("objects", "size"))
    for text in (*_apart(place, inventory.apart), *_losses(inventory.losses)):
        say(text)
    for key in inventory.unknown[:_SHOWN]:
        say(f"unknown: {key}")
    for bad in found.bad:
        say(f"bad: {bad_line(bad)}")
    count = len(place.line.commits)
    what = f"{count} checkpoint{'' if count == 1 else 's'}, {found.checked} objects checked"
    shallow = "" if deep else " (documents and sizes; --deep reads the data)"
    say(f"{f'{len(found.bad)} bad' if found.bad else 'ok'}: {what}{shallow}")


def _apart(place: Place, apart: tuple[Apart, ...]) -> Iterator[str]:
    for one in apart[-_SHOWN:]:
        advice = f", complete: resilient adopt {place.url}@{one.attempt.step} commits it" if one.complete else ""
        yield f"{one.kind}: {one.attempt} ({one.amount.objects} objects, {sizes.in_words(one.amount.nbytes)}){advice}"
    if len(apart) > _SHOWN:
        yield f"... and {len(apart) - _SHOWN} more (--json lists them)"


def _losses(losses: tuple[Loss, ...]) -> Iterator[str]:
    for loss in losses:
        others = [step for step in loss.takes if step != loss.attempt.step]
        shared = f"so would {_steps(others)}, and " if others else ""
        then = (
            "nothing would be left to go on from" if loss.left is None else f"the run would go on from step {loss.left}"
        )
        yield f"if step {loss.attempt.step} were lost, {shared}{then}"


def _steps(steps: list[int]) -> str:
    return f"{'step' if len(steps) == 1 else 'steps'} {', '.join(map(str, steps))}"
