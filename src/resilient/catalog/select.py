"""Which part of a checkpoint some of its items are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from resilient.errors import ErrorKind, NotFoundError
from resilient.format.chunks import Chunk, Chunks
from resilient.format.documents import Manifest


def select(manifest: Manifest, items: Sequence[str] | None) -> Manifest:
    """Return a manifest of these items alone; None means all. Objects stay as they are.

    Raises:
        NotFoundError: the checkpoint has no item of such a name; all of these are named, and those that there are.
    """
    if items is None:
        return manifest
    names = [item.name for item in manifest.items]
    unknown = sorted(set(items) - set(names))
    if unknown:
        raise NotFoundError(
            f"step {manifest.step} has no item {', '.join(map(repr, unknown))}",
            kind=ErrorKind.NO_SUCH_ITEM,
            hint=f"it has {', '.join(names)}",
        )
    kept = [number for number, tensor in enumerate(manifest.tensors) if tensor.item in items]
    numbers = {number: position for position, number in enumerate(kept)}
    chunks = [
        msgspec.structs.replace(chunk, tensor=numbers[chunk.tensor])
        for chunk in manifest.chunks
        if chunk.tensor in numbers
    ]
    return msgspec.structs.replace(
        manifest,
        items=tuple(item for item in manifest.items if item.name in items),
        tensors=tuple(manifest.tensors[number] for number in kept),
        chunks=Chunks.of(chunks),
        values=tuple(value for value in manifest.values if value.item in items),
    )


def chunks_by_tensor(manifest: Manifest) -> dict[int, list[Chunk]]:
    """Return the chunks of each tensor, by its number."""
    found: defaultdict[int, list[Chunk]] = defaultdict(list)
    for chunk in manifest.chunks:
        found[chunk.tensor].append(chunk)
    return dict(found)
