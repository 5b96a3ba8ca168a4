"""``resilient show``: what is in a checkpoint."""

from __future__ import annotations

import math
from dataclasses import asdict

import click

from resilient.catalog.contents import Foreign, read_outline
from resilient.catalog.marks import list_marks
from resilient.cli.ls import describe
from resilient.cli.place import open_place
from resilient.cli.render import json_option, moment, say, say_json, table
from resilient.format import sizes
from resilient.format.documents import Commit, Manifest, Tensor
from resilient.format.dtypes import ITEMSIZE

_ROWS = 40


@click.command(epilog="Example: resilient show runs/gpt@9000 --all")
@click.argument("run", metavar="RUN[@STEP]")
@click.option("--all", "everything", is_flag=True, help=f"Show all tensors, not only the first {_ROWS}.")
@json_option
def show(run: str, *, everything: bool, as_json: bool) -> None:
    """Show what is in a checkpoint of RUN: the newest one, or that of STEP."""
    place = open_place(run)
    commit = place.chosen()
    manifest = read_outline(place.store, commit)
    marks = [] if isinstance(place.store, Foreign) else list_marks(place.store, commit.attempt)
    about = {"metrics": commit.metrics, "notes": [asdict(mark) for mark in marks]}
    if as_json:
        tensors = [
            {
                "name": tensor.name,
                "item": tensor.item,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "nbytes": _nbytes(tensor),
                "rank": tensor.rank,
                "alias": tensor.alias,
            }
            for tensor in manifest.tensors
        ]
        say_json({"run": place.url, **describe(place, commit), "reason": commit.reason, "tensors": tensors} | about)
        return
    _summarize(place.url, commit, manifest)
    for mark in marks:
        host = f" on {mark.host}" if mark.host else ""
        say(f"  {mark.kind:<8} by {mark.by}{host}{f': {mark.why}' if mark.why else ''}")
    shown = manifest.tensors if everything else manifest.tensors[:_ROWS]
    if shown:
        say("")
        table(
            ("item", "tensor", "dtype", "shape", "size", ""),
            [_row(tensor) for tensor in shown],
            right=("size",),
        )
    hidden = len(manifest.tensors) - len(shown)
    if hidden:
        say(f"... and {hidden} more (--all shows them)")


def _summarize(url: str, commit: Commit, manifest: Manifest) -> None:
    kinds = ", ".join(f"{item.name} ({item.kind}{', per rank' if item.per_rank else ''})" for item in manifest.items)
    say(f"step {commit.step} of {url}")
    say(f"  saved    {moment(commit.created)} by generation {commit.generation} on {_ranks(commit)} ({commit.reason})")
    say(f"  items    {kinds}")
    say(f"  tensors  {len(manifest.tensors)} in {len(manifest.chunks)} chunks, {len(manifest.objects)} objects")
    say(f"  values   {len(manifest.values)}")
    say(f"  size     {sizes.in_words(commit.nbytes)}")
    if commit.metrics:
        say(f"  metrics  {', '.join(f'{name} {value:g}' for name, value in sorted(commit.metrics.items()))}")


def _row(tensor: Tensor) -> tuple[str, ...]:
    notes = []
    if tensor.rank is not None:
        notes.append(f"rank {tensor.rank}")
    if tensor.alias is not None:
        notes.append(f"tied to {tensor.alias}")
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return tensor.item, tensor.name, tensor.dtype, shape, sizes.in_words(_nbytes(tensor)), ", ".join(notes)


def _nbytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * ITEMSIZE[tensor.dtype]


def _ranks(commit: Commit) -> str:
    return "1 rank" if commit.world_size == 1 else f"{commit.world_size} ranks"
