"""What must be true of a run whenever nobody is writing to it, whatever happened before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from resilient.catalog.contents import read_manifest
from resilient.catalog.fetch import decoded_nbytes, read_chunk
from resilient.catalog.line import Chain, Line, is_given_up, list_attempts, read_line
from resilient.catalog.once import exists, read_document
from resilient.catalog.references import check_references
from resilient.catalog.run_info import read_info
from resilient.catalog.select import chunks_by_tensor
from resilient.catalog.verify import verify
from resilient.errors import ConflictError, CorruptError, ErrorKind
from resilient.format.box import Box, uncovered
from resilient.format.documents import Commit, Manifest, Tensor
from resilient.format.dtypes import ITEMSIZE
from resilient.format.layout import Attempt
from resilient.store.base import Store

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
Expected: TypeAlias = Callable[[int], Arrays]

_NO_NUMPY: Final = frozenset(
    dtype for dtype in ITEMSIZE if dtype.startswith(("bfloat", "float8", "float4", "complex32"))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One thing that must never be; ``invariant`` names the rule, ``step`` the checkpoint if it is about one."""

    invariant: str
    detail: str
    step: int | None = None

    def __str__(self) -> str:
        where = "" if self.step is None else f"step {self.step}: "
        return f"{self.invariant}: {where}{self.detail}"


def check_run(store: Store, *, at_least: int | None = None, expected: Expected | None = None) -> list[Violation]:
    """Return what is wrong with a run to which nobody writes at the moment; nothing, if all promises are kept.

    What is checked, of the run as a reader finds it now:

    - each checkpoint that is listed is whole: every document and every byte equals its digest, every element of every
      tensor is there, and nothing that it needs was given up;
    - what it refers to in earlier attempts is there, and protected by a mark;
    - no attempt, on the line or not, has a COMMIT without the manifest that it names, unless it was given up;
    - no checkpoint with a TOMBSTONE is listed, unless the run has gone back to it without knowing of that;
    - no damaged document hides checkpoints;
    - the newest checkpoint is not older than ``at_least``, the newest step that was reported as saved;
    - each holds what ``expected(step)`` says, bit for bit, under the names of `read_arrays`. It may hold more.

    Torn and unfinished attempts are no violation: they must only never be listed. Reads everything, so it is for runs
    that tests make.

    Raises:
        StoreError: the run cannot be read now, so nothing can be said.
    """
    try:
        if read_info(store) is None:
            return _lost(at_least, None)
        line = read_line(store)
    except CorruptError as error:
        return [Violation(invariant="the run can be read", detail=str(error))]
    newest = max((commit.step for commit in line.commits), default=None)
    found = [] if newest is not None and newest >= (at_least or 0) else _lost(at_least, newest)
    found.extend(_hidden(line))
    found.extend(_uncovered_commits(store))
    for commit in line.commits:
        found.extend(_check_commit(store, commit, expected, line.chain))
    return found


def read_arrays(store: Store, commit: Commit) -> dict[str, npt.NDArray[Any]]:
    """Return the full tensors of a checkpoint, verified, as ``item.name``, or ``item.rank3.name`` if each rank has one.

    dtypes that numpy lacks (bfloat16, float8, ...) come as unsigned integers of their size.

    Raises:
        CorruptError: it is damaged, or an element of a tensor is nowhere.
    """
    manifest = read_manifest(store, commit)
    return {_title(tensor): array for tensor, array in _arrays(store, manifest)}


def _lost(at_least: int | None, newest: int | None) -> list[Violation]:
    if at_least is None:
        return []
    instead = "there is no checkpoint" if newest is None else f"step {newest} is the newest"
    detail = f"step {at_least} was reported as saved, and {instead}"
    return [Violation(invariant="what was reported as saved is there", detail=detail)]


def _hidden(line: Line) -> Iterator[Violation]:
    # Torn COMMITs hide nothing: an attempt without a whole one never was a checkpoint.
    if line.chain.broken is not None:
        yield Violation(invariant="no damage hides checkpoints", detail=line.chain.broken)


def _uncovered_commits(store: Store) -> Iterator[Violation]:
    for attempt in sorted(attempt for attempt, names in list_attempts(store).items() if "COMMIT" in names):
        try:
            commit = read_document(store, Commit, attempt.commit)
        except CorruptError:
            continue  # torn: counts as absent
        if commit is None or exists(store, attempt.tombstone):
            continue
        try:
            read_manifest(store, commit)
        except CorruptError as error:
            yield Violation(invariant="no COMMIT without its manifest", step=attempt.step, detail=str(error))


def _check_commit(store: Store, commit: Commit, expected: Expected | None, chain: Chain) -> Iterator[Violation]:
    attempt, step = commit.attempt, commit.step
    if is_given_up(store, attempt, chain):
        yield Violation(invariant="what was given up is not listed", step=step, detail=f"{attempt.tombstone} is there")
    damaged = verify(store, [commit], deep=True).bad
    for bad in damaged:
        yield Violation(invariant="what is listed is whole", step=step, detail=f"{bad.object} {bad.why}")
    if damaged:
        return
    manifest = read_manifest(store, commit)
    yield from _check_referring(store, attempt, manifest)
    try:
        arrays = {_title(tensor): array for tensor, array in _arrays(store, manifest)}
    except CorruptError as error:
        yield Violation(invariant="what is listed is whole", step=step, detail=str(error))
        return
    if expected is not None:
        yield from _differences(step, arrays, expected(step))


def _check_referring(store: Store, attempt: Attempt, manifest: Manifest) -> Iterator[Violation]:
    try:
        check_references(store, attempt, (one.key for one in manifest.objects))
    except ConflictError as error:
        yield Violation(invariant="what is referred to is protected", step=attempt.step, detail=str(error))


def _arrays(store: Store, manifest: Manifest) -> Iterator[tuple[Tensor, npt.NDArray[Any]]]:
    chunks = chunks_by_tensor(manifest)
    numbers = {(tensor.item, tensor.name, tensor.rank): number for number, tensor in enumerate(manifest.tensors)}
    for tensor in manifest.tensors:
        number = numbers[tensor.item, tensor.alias or tensor.name, tensor.rank]
        whole: npt.NDArray[Any] = np.zeros(tensor.shape, _dtype(tensor))
        mine = chunks.get(number, [])
        if missing := uncovered(tensor.shape, [chunk.box for chunk in mine]):
            raise CorruptError(f"{missing} elements of {_title(tensor)} are nowhere", kind=ErrorKind.INCOMPLETE)
        for chunk in mine:
            data = bytearray(decoded_nbytes(tensor, chunk))
            read_chunk(store, manifest, chunk, memoryview(data))
            part = np.frombuffer(data, whole.dtype).reshape(chunk.box.size)
            whole[chunk.box.relative_to(Box.whole(tensor.shape))] = part
        yield tensor, whole


def _differences(step: int, arrays: Arrays, wanted: Arrays) -> Iterator[Violation]:
    for name, array in wanted.items():
        found = arrays.get(name)
        if found is None:
            why = f"{name} is not in it, but {', '.join(arrays)}"
        elif found.shape != array.shape or found.dtype.itemsize != array.dtype.itemsize:
            why = f"{name} has {found.shape} of {found.dtype} instead of {array.shape} of {array.dtype}"
        elif found.tobytes() != array.tobytes():  # bits: NaN equals itself, and -0.0 is not 0.0
            why = f"{name} has other contents than were saved"
        else:
            continue
        yield Violation(invariant="a checkpoint holds what was saved", step=step, detail=why)


def _dtype(tensor: Tensor) -> np.dtype[Any]:
    return np.dtype(f"u{ITEMSIZE[tensor.dtype]}" if tensor.dtype in _NO_NUMPY else tensor.dtype)


def _title(tensor: Tensor) -> str:
    return f"{tensor.item}.{tensor.name}" if tensor.rank is None else f"{tensor.item}.rank{tensor.rank}.{tensor.name}"
