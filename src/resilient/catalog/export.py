"""Writing full tensors as safetensors files, for other tools."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from resilient.catalog.fetch import decoded_nbytes, read_chunk
from resilient.catalog.select import chunks_by_tensor, select
from resilient.errors import ErrorKind, StoreError, UsageError
from resilient.format.box import Box
from resilient.format.chunks import Chunk
from resilient.format.documents import Manifest, Tensor
from resilient.format.dtypes import ITEMSIZE, SAFETENSORS_NAME
from resilient.store.base import Store
from resilient.store.os_faults import store_error

_ALIGNMENT: Final = 8


def export_safetensors(
    store: Store,
    manifest: Manifest,
    folder: str | os.PathLike[str],
    *,
    items: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Path, ...]:
    """Write the full tensors of each item into a safetensors file of its name; return the files.

    Every byte is verified before it is written, and no file has its name before all are complete. Needs memory for
    the largest tensor. Tied tensors are written under each of their names; those of a per-rank item as
    ``rank0.name``. What is no tensor has no place in that format and is left out.

    Args:
        store: the run.
        manifest: of the checkpoint.
        folder: a directory that is empty or not there.
        items: only these; None for all.
        progress: called with the bytes written and the bytes to write.

    Raises:
        UsageError: the folder is not empty, or safetensors has no word for a dtype; tensors are named.
        NotFoundError: the checkpoint has no such item.
        CorruptError: it is damaged.
        StoreError: the folder cannot be written.
    """
    chosen = select(manifest, items)
    _check_dtypes(chosen)
    target = Path(folder)
    files = _Files(target)
    try:
        files.prepare()
        _write_items(store, chosen, files, progress)
        return files.publish()
    except OSError as error:
        files.discard()
        if isinstance(error, StoreError):
            raise
        raise store_error(error, doing="export", path=target, nbytes=chosen.nbytes) from error
    except BaseException:
        files.discard()
        raise


def _check_dtypes(manifest: Manifest) -> None:
    strange = [tensor for tensor in manifest.tensors if tensor.dtype not in SAFETENSORS_NAME]
    if strange:
        shown = ", ".join(f"{tensor.item}.{tensor.name} ({tensor.dtype})" for tensor in strange[:5])
        raise UsageError(
            f"safetensors cannot hold {shown}{', ...' if len(strange) > 5 else ''}",
            kind=ErrorKind.INVALID_ARGUMENT,
            hint="use --format torch, or leave that item out with --items",
        )


class _Files:
    """The files of one export: under temporary names until all of them are complete."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[Path, Path] = {}
        self._made = False

    def prepare(self) -> None:
        """Make the folder.

        Raises:
            UsageError: it is there and not empty.
        """
        try:
            self._folder.mkdir(parents=True)
        except FileExistsError:
            if any(self._folder.iterdir()):
                raise UsageError(
                    f"{self._folder} is not empty", kind=ErrorKind.DESTINATION_NOT_EMPTY, hint="name an empty directory"
                ) from None
        else:
            self._made = True

    def open(self, name: str) -> BinaryIO:
        """Open a file that will bear this name."""
        temporary = self._folder / f".{secrets.token_hex(8)}.tmp"
        self._names[temporary] = self._folder / name
        return temporary.open("xb")

    def publish(self) -> tuple[Path, ...]:
        """Give all files their names."""
        for temporary, final in self._names.items():
            temporary.replace(final)
        return tuple(self._names.values())

    def discard(self) -> None:
        """Remove what was written."""
        with suppress(OSError):  # the error that led here matters more
            for path in (*self._names, *self._names.values()):
                path.unlink(missing_ok=True)
            if self._made:
                self._folder.rmdir()


def _write_items(store: Store, manifest: Manifest, files: _Files, progress: Callable[[int, int], None] | None) -> None:
    chunks = chunks_by_tensor(manifest)
    numbers = {(tensor.item, tensor.name, tensor.rank): number for number, tensor in enumerate(manifest.tensors)}
    total = sum(_nbytes(tensor) for tensor in manifest.tensors)
    done = 0
    for item in manifest.items:
        tensors = [tensor for tensor in manifest.tensors if tensor.item == item.name]
        if not tensors:
            continue
        # The largest elements first, so that each tensor is aligned to its own without gaps, which the format forbids.
        tensors.sort(key=lambda tensor: (-ITEMSIZE[tensor.dtype], _title(tensor)))
        with files.open(f"{quote(item.name, safe='')}.safetensors") as file:
            file.write(_header(manifest, tensors))
            for tensor in tensors:
                number = numbers[tensor.item, tensor.alias or tensor.name, tensor.rank]
                file.write(_full(store, manifest, tensor, chunks.get(number, [])))
                done += _nbytes(tensor)
                if progress is not None:
                    progress(done, total)
            file.flush()
            os.fsync(file.fileno())


def _header(manifest: Manifest, tensors: Sequence[Tensor]) -> bytes:
    members: dict[str, object] = {"__metadata__": {"format": "pt", "step": str(manifest.step)}}
    start = 0
    for tensor in tensors:
        end = start + _nbytes(tensor)
        members[_title(tensor)] = {
            "dtype": SAFETENSORS_NAME[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(members, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _full(store: Store, manifest: Manifest, tensor: Tensor, chunks: Sequence[Chunk]) -> memoryview:
    """Return the bytes of a whole tensor, each of them verified."""
    # Elements are moved and never looked at, so bytes of the right size will do for every dtype.
    element = np.dtype((np.void, ITEMSIZE[tensor.dtype]))
    whole: npt.NDArray[np.void] = np.empty(tensor.shape, element)
    for chunk in chunks:
        data = bytearray(decoded_nbytes(tensor, chunk))
        read_chunk(store, manifest, chunk, memoryview(data))
        whole[chunk.box.relative_to(Box.whole(tensor.shape))] = np.frombuffer(data, element).reshape(chunk.size)
    return whole.reshape(-1).view(np.uint8).data


def _nbytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * ITEMSIZE[tensor.dtype]


def _title(tensor: Tensor) -> str:
    return tensor.name if tensor.rank is None else f"rank{tensor.rank}.{tensor.name}"
