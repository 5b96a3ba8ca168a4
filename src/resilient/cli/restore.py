"""``resilient restore``: a checkpoint brought to another place."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from resilient.catalog.commit import read_manifest
from resilient.catalog.copy import copy
from resilient.catalog.export import export_safetensors
from resilient.catalog.marks import reading
from resilient.cli.place import Place, open_place, open_until_done
from resilient.cli.render import json_option, note, progress, say, say_json, size
from resilient.clock import SYSTEM_CLOCK
from resilient.errors import CorruptError, ErrorKind, UsageError
from resilient.format.documents import Commit

_EXPORT_TORCH: Final = "resilient.engine.export_torch"


class _ChildFailedError(Exception):
    """The other process has said already what went wrong."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


@click.command(epilog="Example: resilient restore runs/gpt@9000 exported --format safetensors --items model")
@click.argument("run", metavar="RUN[@STEP]")
@click.argument("destination", metavar="DEST")
@click.option(
    "--format",
    "form",
    type=click.Choice(["native", "safetensors", "torch"]),
    default="native",
    show_default=True,
    help="A run of its own, or a folder with a file of full tensors for each item.",
)
@click.option("--items", help="Only these items, with commas between them.")
@json_option
@click.pass_context
def restore(ctx: click.Context, run: str, destination: str, *, form: str, items: str | None, as_json: bool) -> None:
    """Copy a checkpoint of RUN to DEST: the newest usable one, or that of STEP.

    Every byte is verified on its way, and DEST holds all of it or nothing that counts. DEST must be empty or absent.
    """
    place = open_place(run)
    chosen = None if items is None else [name for name in (part.strip() for part in items.split(",")) if name]
    if form != "native":
        _refuse_full(destination)
    try:
        commit = _restore(place, destination, form, chosen)
    except _ChildFailedError as failed:
        ctx.exit(failed.exit_code)
    if as_json:
        found: dict[str, Any] = {"run": place.url, "step": commit.step, "destination": destination, "format": form}
        say_json(found | {"items": chosen or list(commit.items), "nbytes": commit.nbytes})
    else:
        say(f"step {commit.step} of {place.url} is in {destination} ({form}, {size(commit.nbytes)}, verified)")


def _restore(place: Place, destination: str, form: str, items: Sequence[str] | None) -> Commit:
    """Restore the step that was asked for; if none was, the newest that is whole."""
    commit = place.chosen()
    if place.step is not None:
        _restore_one(place, commit, destination, form, items)
        return commit
    for why in place.line.ignored:
        note(why)
    older = list(place.line.commits[1:])
    while True:
        try:
            _restore_one(place, commit, destination, form, items)
        except CorruptError as error:
            if not older:
                raise
            note(f"step {commit.step} is not usable, trying step {older[0].step}: {error}")
            commit = older.pop(0)
        else:
            return commit


def _restore_one(place: Place, commit: Commit, destination: str, form: str, items: Sequence[str] | None) -> None:
    if form == "torch":
        _run_export_torch(place, commit, destination, items)
        return
    with reading(place.store, commit), progress("restored") as watch:
        if form == "native":
            target = open_until_done(destination)
            copy(place.store, commit, target, items=items, clock=SYSTEM_CLOCK, progress=watch)
        else:
            manifest = read_manifest(place.store, commit)
            export_safetensors(place.store, manifest, destination, items=items, progress=watch)


def _run_export_torch(place: Place, commit: Commit, destination: str, items: Sequence[str] | None) -> None:
    """Run the one conversion that needs torch as a process of its own: no other command ever waits for torch."""
    folder = Path(destination).absolute()
    # Beside the destination, then renamed: files of a step that turns out to be damaged must not stay.
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.partial")
    command = [sys.executable, "-m", _EXPORT_TORCH, place.url, str(commit.step), str(partial), *(items or ())]
    try:
        with reading(place.store, commit):
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- our own module
        if done.returncode == CorruptError.exit_code:
            why = next((line for line in done.stderr.splitlines() if line.startswith("error: ")), "it is damaged")
            raise CorruptError(why.removeprefix("error: "), kind=ErrorKind.BAD_DIGEST)
        if done.returncode:
            click.echo(done.stderr.rstrip(), err=True)
            raise _ChildFailedError(max(1, done.returncode))
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _refuse_full(destination: str) -> None:
    if "://" in destination:
        raise UsageError(
            f"this format is written to a directory of this machine, not to {destination}",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint="name a directory and upload it afterwards, or use --format native",
        )
    folder = Path(destination)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{destination} is not an empty directory",
            kind=ErrorKind.DESTINATION_NOT_EMPTY,
            hint="name one that is empty or not there",
        )
