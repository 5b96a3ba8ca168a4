"""What tests of staging share: a rank that is alone, threads that do not run, what lies in a slot by name."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future
from typing import Any

import torch

from resilient.engine.division import divide
from resilient.engine.placement import Placement, place
from resilient.engine.stage import Stager, Staging
from resilient.format.box import Box
from resilient.state.leaves import Captured
from resilient.writer.slot import Slot

Bytes = dict[tuple[str, str], bytes]


def placement_of(captured: Captured, *, chunk_nbytes: int = 1 << 20, world_size: int = 1, rank: int = 0) -> Placement:
    pieces = list(divide(captured, world_size=world_size, chunk_nbytes=chunk_nbytes, agreed=True))
    return place(captured, pieces, rank=rank, agreed=True, compare_all=True)


def lying_in(slot: Slot, captured: Captured, placement: Placement) -> Bytes:
    """Return the row-major bytes of each leaf, put together from its pieces."""
    found: Bytes = {}
    whole: dict[int, torch.Tensor] = {}
    for placed in placement.placed:
        if placed.at < 0:
            continue
        piece, leaf = placed.piece, captured.tensors[placed.piece.leaf]
        local = captured.locals[piece.leaf]
        into = whole.setdefault(piece.leaf, torch.zeros(leaf.box.size, dtype=local.dtype))
        data = torch.frombuffer(bytearray(slot.payload[placed.at : placed.at + piece.nbytes]), dtype=local.dtype)
        into[piece.box.relative_to(leaf.box)] = data.reshape(piece.box.size)
    for number, tensor in whole.items():
        leaf = captured.tensors[number]
        key = leaf.name if leaf.box == Box.whole(leaf.shape) else f"{leaf.name} {leaf.box}"
        found[leaf.item, key] = bits(tensor)
    return found


def live(captured: Captured) -> Bytes:
    """Return the row-major bytes of each leaf as they are now."""
    return {
        (leaf.item, leaf.name if leaf.box == Box.whole(leaf.shape) else f"{leaf.name} {leaf.box}"): bits(local)
        for leaf, local in zip(captured.tensors, captured.locals, strict=True)
        if leaf.alias is None and local.numel()
    }


def bits(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


class Held(Executor):
    """Copying threads that do not get to run: until `let_go`, or for as long as a fence does their work."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._calls.append(lambda: fn(*args, **kwargs))
        return Future()

    def let_go(self) -> None:
        while self._calls:
            self._calls.pop(0)()


class Staged:
    """A stager, held or not, with a slot and what was last staged."""

    def __init__(self, *, held: bool = False, chunk_nbytes: int = 1 << 20) -> None:
        self.pool = Held() if held else None
        self.stager = Stager(threads=2, pool=self.pool)
        self.slot = Slot.create("test")
        self._chunk_nbytes = chunk_nbytes
        self.step = 0

    def stage(
        self, captured: Captured, overlapped: Collection[int] | None = None, *, rank: int = 0, world_size: int = 1
    ) -> Staging:
        self.step += 1
        self._captured = captured
        self._placement = placement_of(captured, chunk_nbytes=self._chunk_nbytes, rank=rank, world_size=world_size)
        everything = set(range(len(captured.tensors))) if overlapped is None else overlapped
        return self.stager.stage(
            captured, self._placement, self.slot, generation=3, step=self.step, overlapped=everything
        )

    def ended(self, staging: Staging) -> BaseException | None:
        if self.pool is not None:
            self.pool.let_go()
        return staging.done.exception(30)

    def bytes(self) -> Bytes:
        return lying_in(self.slot, self._captured, self._placement)

    def close(self) -> None:
        self.stager.close()
        self.slot.close()
