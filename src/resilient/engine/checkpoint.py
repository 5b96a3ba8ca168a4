"""One committed step, as a user sees it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch

from resilient.catalog.contents import Contents, open_manifest
from resilient.catalog.verify import Verification, verify
from resilient.engine.peers import Peers
from resilient.engine.read import fill
from resilient.engine.restore import load_into
from resilient.errors import ErrorKind, NotFoundError, UsageError
from resilient.events import Bus
from resilient.format.box import Box
from resilient.format.documents import Commit, Tensor
from resilient.state.prepare import Target
from resilient.state.tensors import dtype_of
from resilient.store.base import Store


class Checkpoint:
    """A committed step. Immutable; reading what is not asked for costs nothing."""

    def __init__(self, store: Store, commit: Commit) -> None:
        self._store = store
        self._commit = commit

    @property
    def step(self) -> int:
        """Completed steps of training."""
        return self._commit.step

    @property
    def generation(self) -> int:
        """Which life of the worker group saved it."""
        return self._commit.generation

    @property
    def items(self) -> tuple[str, ...]:
        """The names of its items."""
        return self._commit.items

    @property
    def world_size(self) -> int:
        """On how many ranks it was saved."""
        return self._commit.world_size

    @property
    def created(self) -> str:
        """When it was committed: RFC 3339, UTC, by the committer's clock."""
        return self._commit.created

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return self._commit.nbytes

    @cached_property
    def _manifest(self) -> Contents:
        return open_manifest(self._store, self._commit)

    def verify(self, *, deep: bool = True) -> Verification:
        """Compare what is stored with its digests: all of it, or (``deep=False``) documents and sizes only."""
        return verify(self._store, [self._commit], deep=deep)

    def load(self, into: Mapping[str, object], *, strict: bool = True) -> None:
        """Fill items, on this rank's part of any layout; every rank of the job must call it.

        Raises:
            UsageError: names, shapes or dtypes differ; all are listed, nothing was changed.
            CorruptError: stored bytes are wrong; ``into`` is then spoiled.
        """
        load_into(self._store, into, Peers.current(), self._commit, strict=strict, bus=Bus())

    def tensor(self, name: str, *, rank: int | None = None) -> torch.Tensor:
        """Return one full tensor on the CPU, reading only its bytes; no other rank is needed.

        Args:
            name: ``item.name`` as `resilient show` prints it, or the name alone if only one item has it.
            rank: whose, for a tensor of a per-rank item.
        """
        tensor = self._find(name, rank)
        full = torch.empty(tensor.shape, dtype=dtype_of(tensor.dtype))
        fill(self._store, self._manifest, [Target(tensor=tensor, box=Box.whole(tensor.shape), into=full)])
        return full

    def _find(self, name: str, rank: int | None) -> Tensor:
        tensors = [tensor for tensor in self._manifest.tensors if tensor.rank == rank]
        exact = [tensor for tensor in tensors if f"{tensor.item}.{tensor.name}" == name]
        found = exact or [tensor for tensor in tensors if tensor.name == name]
        if not found:
            raise NotFoundError(
                f"step {self.step} has no tensor {name!r}" + ("" if rank is None else f" of rank {rank}"),
                kind=ErrorKind.NO_SUCH_ITEM,
                hint="`resilient show RUN@STEP` lists them",
            )
        if len(found) > 1:
            names = ", ".join(f"{tensor.item}.{tensor.name}" for tensor in found)
            raise UsageError(f"{name!r} is in more than one item: {names}", kind=ErrorKind.INVALID_ARGUMENT)
        (tensor,) = found
        return tensor if tensor.alias is None else self._find(f"{tensor.item}.{tensor.alias}", rank)

    def __repr__(self) -> str:
        return f"<checkpoint of step {self.step}: {self.nbytes} bytes on {self.world_size} ranks in {self._store.url}>"
