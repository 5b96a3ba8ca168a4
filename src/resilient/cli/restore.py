"""``resilient restore``: a checkpoint brought to another place."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from resilient.catalog.choosing import nothing_usable, why_failed
from resilient.catalog.contents import read_manifest
from resilient.catalog.copy import copy
from resilient.catalog.export import export_safetensors
from resilient.catalog.marks import reading
from resilient.cli.place import Place, open_place, open_until_done, parse
from resilient.cli.render import json_option, note, progress, say, say_json
from resilient.clock import SYSTEM_CLOCK
from resilient.errors import (
    ConflictError,
    CorruptError,
    ErrorKind,
    NotFoundError,
    StoreError,
    UsageError,
)
from resilient.format import sizes
from resilient.format.documents import Commit, Manifest
from resilient.store.os_faults import store_error

_EXPORT_TORCH: Final = "resilient.engine.export_torch"
_CLASSES: Final = {one.exit_code: one for one in (UsageError, NotFoundError, ConflictError, CorruptError, StoreError)}


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
def restore(run: str, destination: str, *, form: str, items: str | None, as_json: bool) -> None:
    """Copy a checkpoint of RUN to DEST: the newest usable one, or that of STEP.

    Every byte is verified on its way, and DEST holds all of it or nothing that counts. DEST must be empty or absent.
    """
    chosen = None if items is None else _names(items)
    place = open_place(run)
    if form == "native":
        _refuse_step(destination)
    else:
        _refuse_full(destination)
    commit = _restore(place, destination, form, chosen)
    if as_json:
        found: dict[str, Any] = {"run": place.url, "step": commit.step, "destination": destination, "format": form}
        say_json(found | {"items": chosen or list(commit.items), "nbytes": commit.nbytes})
    else:
        say(
            f"step {commit.step} of {place.url} is in {destination} ({form}, {sizes.in_words(commit.nbytes)}, verified)"
        )


def _names(items: str) -> list[str]:
    names = [name for name in (part.strip() for part in items.split(",")) if name]
    if not names:
        raise UsageError(
            f"--items {items!r} names no item",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint="leave the option out to restore all of them",
        )
    return names


def _restore(place: Place, destination: str, form: str, items: Sequence[str] | None) -> Commit:
    """Restore the step that was asked for; if none was, the newest that is whole."""
    commit = place.chosen()
    if place.step is not None:
        why = why_failed(place.store, commit)
        if why is not None:
            note(f"step {commit.step} is {why}; it is restored because it was asked for")
        _restore_one(place, commit, destination, form, items)
        return commit
    for why in place.line.ignored:
        note(why)
    marked: list[str] = []
    for commit, after in zip(place.line.commits, [*place.line.commits[1:], None], strict=True):
        why = why_failed(place.store, commit)
        if why is not None:
            marked.append(f"step {commit.step}: {why}")
        else:
            try:
                _restore_one(place, commit, destination, form, items)
            except CorruptError as error:
                if after is None:
                    raise
                why = str(error)
            else:
                return commit
        if after is not None:
            note(f"step {commit.step} is not usable, trying step {after.step}: {why}")
    raise nothing_usable(place.store, marked, marked=True)


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
            _say_what_is_left_out(manifest, items)


def _say_what_is_left_out(manifest: Manifest, items: Sequence[str] | None) -> None:
    left = dict.fromkeys(value.item for value in manifest.values if items is None or value.item in items)
    if left:
        note(
            f"safetensors holds tensors only; other values are left out, of {', '.join(left)} (--format torch has them)"
        )


def _run_export_torch(place: Place, commit: Commit, destination: str, items: Sequence[str] | None) -> None:
    """Run the one conversion that needs torch as a process of its own: no other command ever waits for torch."""
    folder = Path(destination).absolute()
    # Beside the destination, then renamed: files of a step that turns out to be damaged must not stay.
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.partial")
    command = [sys.executable, "-m", _EXPORT_TORCH, place.url, str(commit.step), str(partial), *(items or ())]
    try:
        with reading(place.store, commit):
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- our own module
        if done.returncode:
            _raise_again(done)
        try:
            partial.rename(folder)
        except OSError as error:
            raise store_error(error, doing="export", path=folder) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _raise_again(done: subprocess.CompletedProcess[str]) -> NoReturn:
    """Raise here what ended the other process."""
    lines = done.stdout.splitlines()
    if done.returncode not in _CLASSES or not lines:
        last = (done.stderr.splitlines() or ["it said nothing"])[-1]
        raise StoreError(f"the export ended with exit code {done.returncode}: {last}", kind=ErrorKind.IO)
    found = json.loads(lines[-1])["error"]
    raise _CLASSES[done.returncode](found["message"], kind=ErrorKind(found["kind"]), hint=found["hint"])


def _refuse_step(destination: str) -> None:
    step = parse(destination)[1]
    if step is not None:
        raise UsageError(
            f"{destination} could not be read again: @{step} at its end means a step",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint=f"choose another name, or end it with a slash wherever you write it: {destination}/",
        )


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
