"""Write the golden checkpoint of this version's format, once, when that format is released.

``python -m tests.compat.make_golden`` writes ``tests/compat/v<format>/run``, which is then checked in for ever: what it
it holds is what every later version must read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import resilient
from resilient.format.dtypes import ITEMSIZE
from resilient.format.version import FORMAT

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (5,), (2, 3))
VALUES: dict[str, Any] = {
    "none": None,
    "flags": [True, False],
    "numbers": {"int": -7, "big": 2**100, "half": 0.5, "infinite": float("inf"), "complex": 1 + 2j},
    "text": "Grüße",
    "bytes": b"\x00\xff",
    "tuple": (1, ("two", 3.0)),
    "keys": {1: "one", (2, 3): "pair"},
    "set": {1, 2, 3},
}


class Tied(torch.nn.Module):
    """Two names for one weight, a buffer, and numbers that are exact in every arithmetic."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(3, 3, bias=False)
        self.decoder = torch.nn.Linear(3, 3, bias=True)
        self.decoder.weight = self.encoder.weight
        self.register_buffer("scale", torch.ones(()))


def trained(step: int) -> tuple[Tied, torch.optim.Optimizer]:
    """Return model and optimizer after so many steps with gradients of one."""
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + 16 * number)
    for _ in range(step):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    model.scale.fill_(step)
    return model, optimizer


def arrays(step: int) -> dict[str, torch.Tensor]:
    """Return a tensor of each dtype and shape, with bits that depend on the step."""
    return {f"{dtype.removeprefix('torch.')}{list(shape)}": _array(dtype, shape, step) for dtype, shape in _cases()}


def state(step: int) -> dict[str, Any]:
    """Return the items of a step."""
    model, optimizer = trained(step)
    return {"model": model, "optimizer": optimizer, "arrays": arrays(step), "values": {**VALUES, "step": step}}


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, whatever its dtype."""
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()) if tensor.numel() else b""


def _cases() -> Iterator[tuple[str, tuple[int, ...]]]:
    for dtype in ITEMSIZE:
        if dtype != "float4_e2m1fn_x2":  # torch cannot copy it
            yield from ((dtype, shape) for shape in SHAPES)


def _array(dtype: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    if dtype == "bool":
        return (torch.arange(count) % 2 == step % 2).view(shape)
    raw = (torch.arange(count * ITEMSIZE[dtype]) * 37 + step) % 256
    return raw.to(torch.uint8).view(getattr(torch, dtype)).view(shape)


def main(folder: Path) -> None:
    """Save steps 10 and 20, go back to 10, and save 15 from there: 20 is then no longer on the line."""
    if folder.exists():
        sys.exit(f"{folder} exists; a golden checkpoint is written once")
    place = str(folder)
    for step in (10, 20):
        resilient.save(place, step, state(step)).wait(60)
    resilient.load(place, state(0), step=10)
    resilient.save(place, 15, state(15)).wait(60)


if __name__ == "__main__":
    main(Path(__file__).parent / f"v{FORMAT}" / "run")
