"""Copying from accelerators into a slot, on a stream of their own, in the order of the device's work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from resilient.engine.copy_plan import Run
from resilient.engine.copying import Target
from resilient.state.leaves import TensorLeaf


class DeviceCopies:
    """Copies that are under way. The host waits in `wait` only; `fence` makes the device's later work wait."""

    def __init__(self) -> None:
        self._alive: list[torch.Tensor] = []
        self._ends: list[tuple[torch.device, torch.Event]] = []

    @torch.no_grad()
    def start(
        self, runs: Iterable[Run], leaves: Sequence[TensorLeaf], locals_: Sequence[torch.Tensor], to: Target
    ) -> None:
        """Copy what the work that has been given to the devices so far leaves in these tensors."""
        by_device: dict[torch.device, list[Run]] = {}
        for run in runs:
            by_device.setdefault(locals_[run.leaf].device, []).append(run)
        buffer = torch.frombuffer(to.payload, dtype=torch.uint8)
        for device, some in by_device.items():
            side = torch.Stream(device=device)
            side.wait_stream(torch.accelerator.current_stream(device))
            end = torch.Event(device=device)
            self._ends.append((device, end))
            try:
                with side:
                    for run in some:
                        self._copy(run, leaves[run.leaf], locals_[run.leaf].detach(), buffer)
            finally:
                end.record(side)  # also if this fails or is interrupted: `wait` waits for what has begun

    def _copy(self, run: Run, leaf: TensorLeaf, local: torch.Tensor, buffer: torch.Tensor) -> None:
        for placed in run.placed:
            source = local[placed.piece.box.relative_to(leaf.box)]
            into = buffer[placed.at : placed.at + placed.piece.nbytes].view(source.dtype)
            # Alive until the copy is over: the allocator would give the memory to the next tensor.
            self._alive.append(source)
            into.view(source.shape).copy_(source, non_blocking=True)

    def fence(self) -> None:
        """Make what the devices are given from now on wait for the copies; the host goes on."""
        for device, end in self._ends:
            torch.accelerator.current_stream(device).wait_event(end)

    def wait(self) -> None:
        """Return when the copies are over."""
        for _, end in self._ends:
            end.synchronize()
        self._alive.clear()
