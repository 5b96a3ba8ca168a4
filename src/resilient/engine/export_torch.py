"""Writing a checkpoint as ``torch.save`` files of full tensors, for other tools.

``python -m resilient.engine.export_torch``: a process of its own, because the command line never imports torch. What it
writes is for leaving: nothing here ever reads it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from resilient.catalog.contents import read_manifest
from resilient.catalog.dcp.view import run_at
from resilient.catalog.line import read_line
from resilient.engine.read import fill
from resilient.errors import ErrorKind, NotFoundError, ResilientError, UsageError
from resilient.format import values
from resilient.format.box import Box
from resilient.format.documents import Key, Manifest
from resilient.state.prepare import Target
from resilient.state.tensors import dtype_of
from resilient.state.trees import build
from resilient.store.base import Store
from resilient.store.open import open_store
from resilient.store.os_faults import store_error

Progress = Callable[[int, int], None]


def export_torch(
    store: Store,
    manifest: Manifest,
    folder: Path,
    *,
    items: Collection[str] | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Write ``<item>.pt`` files that ``torch.load(weights_only=True)`` reads, each whole or not at all.

    An item is a nested dictionary of full tensors and values; of a per-rank item it is ``{rank: dictionary}``.

    Raises:
        NotFoundError: an item that is not in the checkpoint.
        UsageError: the folder has such a file already.
    """
    names = [item.name for item in manifest.items if items is None or item.name in items]
    missing = sorted(set(items or ()) - set(names))
    if missing:
        raise NotFoundError(
            f"the checkpoint has no item {', '.join(missing)}",
            kind=ErrorKind.NO_SUCH_ITEM,
            hint=f"it has {', '.join(item.name for item in manifest.items)}",
        )
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name in names:
        file = folder / f"{name}.pt"
        if file.exists():
            raise UsageError(
                f"{file} exists already", kind=ErrorKind.DESTINATION_NOT_EMPTY, hint="choose an empty folder"
            )
        partial = folder / f".{name}.pt.partial"
        torch.save(read_item(store, manifest, name, progress), partial)
        partial.rename(file)
        files.append(file)
    return files


def read_item(store: Store, manifest: Manifest, item: str, progress: Progress | None = None) -> dict[Any, Any]:
    """Return an item as nested dictionaries, lists and tuples, with full tensors on the CPU."""
    by_rank: dict[int | None, list[tuple[tuple[Key, ...], Any]]] = {}
    tensors = [tensor for tensor in manifest.tensors if tensor.item == item]
    full = {
        (tensor.name, tensor.rank): torch.empty(tensor.shape, dtype=dtype_of(tensor.dtype))
        for tensor in tensors
        if tensor.alias is None
    }
    targets = [
        Target(tensor=tensor, box=Box.whole(tensor.shape), into=full[tensor.name, tensor.rank])
        for tensor in tensors
        if tensor.alias is None
    ]
    fill(store, manifest, targets, progress)
    for tensor in tensors:
        leaf = full[tensor.alias or tensor.name, tensor.rank]
        by_rank.setdefault(tensor.rank, []).append((tensor.path, leaf))
    for value in manifest.values:
        if value.item == item:
            by_rank.setdefault(value.rank, []).append((value.path, values.decode(value.data)))
    if set(by_rank) <= {None}:
        return build(by_rank.get(None, []))
    return {rank: build(found) for rank, found in sorted(by_rank.items(), key=lambda pair: pair[0] or 0)}


def main(arguments: list[str]) -> int:
    """Export ``PLACE STEP FOLDER [ITEM ...]``; return the exit code.

    Errors go to stderr for people, and to stdout as a line of JSON for the command that started this.
    """
    place, step, folder, *items = arguments
    store: Store = open_store(place)
    try:
        store = run_at(store)
        commit = read_line(store).at(int(step))
        for file in export_torch(store, read_manifest(store, commit), Path(folder), items=items or None):
            sys.stdout.write(f"{file}\n")
    except ResilientError as error:
        return _report(error)
    except OSError as error:
        return _report(store_error(error, doing="export", path=Path(folder)))
    return 0


def _report(error: ResilientError) -> int:
    hint = f"hint: {error.hint}\n" if error.hint else ""
    sys.stderr.write(f"error: {error}\n{hint}")
    found = {"kind": str(error.kind), "message": str(error), "hint": error.hint}
    sys.stdout.write(json.dumps({"error": found}) + "\n")
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
