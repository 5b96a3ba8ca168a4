"""What a load will do, and everything that speaks against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from resilient.errors import ErrorKind, UsageError
from resilient.format.box import Box
from resilient.format.documents import Tensor
from resilient.state.gathering import checked_place
from resilient.state.tensors import dtype_name, is_simple
from resilient.state.wrappers import Shard


class Target(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Bytes to read: ``box`` of a stored tensor, never empty, into a tensor of that size, of any strides and device."""

    tensor: Tensor
    box: Box
    into: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loading:
    """A load that has been checked as a whole: fill the targets, then `finish`.

    ``unexpected``: what is in the checkpoint and nothing on this rank wants. It speaks against the load if no other
    rank wants it either: one stage of a pipeline wants what the others do not have.
    """

    targets: tuple[Target, ...]
    installs: tuple[Callable[[], object], ...]
    unexpected: tuple[str, ...] = ()

    def finish(self) -> None:
        """Put values, optimizer state and fresh tensors into their places; call it once, with all targets filled."""
        for install in self.installs:
            install()


def mismatch(step: int, lines: Sequence[str]) -> UsageError:
    """Return the error that lists all that speaks against a load."""
    return UsageError(
        "\n  ".join([f"what was saved at step {step} is not what it would be loaded into:", *lines]),
        kind=ErrorKind.MISMATCH,
        hint="nothing was changed; strict=False loads what both have, but never another shape or dtype",
    )


def unexpected_line(name: str) -> str:
    return f"in the checkpoint, but wanted by nothing here: {name}"


class Plan:
    """Collects what a load will do, and all that is missing, left over or different, before anything is touched."""

    def __init__(self) -> None:
        self.targets: list[Target] = []
        self.installs: list[Callable[[], object]] = []
        self.last: list[Callable[[], object]] = []  # random state: whatever else is installed may draw from it
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.different: list[str] = []
        self.num_tensors = 0
        self.num_wanted = 0

    def fill_alike(
        self, saved: Mapping[str, Tensor], wanted: Sequence[tuple[str, torch.Tensor | Shard]]
    ) -> list[tuple[str, torch.Tensor | Shard]]:
        """Plan to read the tensors that lie in memory as they were stored, and return the others.

        What `fill` does comes to the same. Nearly all are such, and there may be 100,000: one loop, without a call that
        can be spared.
        """
        others: list[tuple[str, torch.Tensor | Shard]] = []
        boxes: dict[tuple[int, ...], Box] = {}
        targets = self.targets
        for pair in wanted:
            name, into = pair
            stored = saved.get(name)
            if stored is None or stored.alias is not None or not is_simple(into):
                others.append(pair)
                continue
            shape = stored.shape
            if shape != into.shape or stored.dtype != dtype_name(into.dtype):
                others.append(pair)
            elif 0 not in shape:
                box = boxes.get(shape) or boxes.setdefault(shape, Box.whole(shape))
                live = into.detach() if into.requires_grad else into
                targets.append(Target(tensor=stored, box=box, into=live))
        self.num_tensors += len(wanted) - len(others)
        return others

    def fill(self, item: str, name: str, saved: Tensor, into: torch.Tensor | Shard) -> None:
        """Plan to read a stored tensor into one that is there, or note how the two differ."""
        tensor = into.tensor if isinstance(into, Shard) else into
        placed = checked_place(item, name, tensor)
        shape, parts = placed.shape, placed.parts
        if isinstance(into, Shard):
            shape, parts = into.global_shape, ((into.box, parts[0][1]),)
        if saved.dtype != dtype_name(tensor.dtype):
            self.different.append(f"{item}.{name}: saved as {saved.dtype}, wanted as {dtype_name(tensor.dtype)}")
        if saved.shape != shape:
            self.different.append(f"{item}.{name}: saved with shape {saved.shape}, wanted with shape {shape}")
            return
        self.num_tensors += 1
        for box, view in parts:
            if box.volume:
                self.targets.append(Target(tensor=saved, box=box, into=self._writable(tensor, view)))

    def check(self, step: int, *, strict: bool, alone: bool, notices: list[str]) -> Loading:
        """Return the load, or raise one `UsageError` that lists all that speaks against it.

        ``strict=False`` accepts names that only one side has, and reports them in ``notices``; never another shape or
        dtype. ``alone=False`` leaves it to the caller to find out whether other ranks want what is unexpected here.
        """
        missing = [f"not in the checkpoint: {name}" for name in self.missing]
        unexpected = [unexpected_line(name) for name in self.unexpected]
        if not strict:
            notices += missing + unexpected
            missing = unexpected = []
        if missing or self.different or (unexpected and alone):
            raise mismatch(step, [*missing, *unexpected, *self.different])
        if self.num_wanted and not self.num_tensors:
            raise UsageError(
                f"not one tensor that was saved at step {step} is wanted here",
                kind=ErrorKind.MISMATCH,
                hint="compare the names: resilient show lists those in the checkpoint",
            )
        left = tuple(self.unexpected) if strict else ()
        return Loading(targets=tuple(self.targets), installs=(*self.installs, *self.last), unexpected=left)

    def _writable(self, tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        """Return where the bytes may go: the destination, or a fresh tensor that is put in its place at the end."""
        if not view.is_contiguous() and any(
            stride == 0 and size > 1 for stride, size in zip(view.stride(), view.shape, strict=True)
        ):
            # An expanded tensor has one element in many places; it becomes one with elements of its own.
            fresh = torch.empty_like(view, memory_format=torch.contiguous_format)
            self.installs.append(lambda: setattr(tensor, "data", fresh))
            return fresh
        if view.is_conj() or view.is_neg():
            fresh = torch.empty_like(view, memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
            self.installs.append(lambda: view.copy_(fresh))
            return fresh
        return view
