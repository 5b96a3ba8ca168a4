"""The GPT of the examples, made as large as a benchmark wants it, in training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from training_loops import Training

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "gpt"))
import model as example

LAYERS, HEADS, BATCH = 12, 12, 2


class Gpt:
    """Forward and backward of the example's model on its text: what `Training` takes for its work."""

    def __init__(self, width: int) -> None:
        example.WIDTH, example.HEADS, example.LAYERS = width, HEADS, LAYERS
        self.model: nn.Module = example.GPT()
        self._data = example.Text()
        self._draw = torch.Generator().manual_seed(0)

    def run(self) -> None:
        places = torch.randint(len(self._data), (BATCH,), generator=self._draw).tolist()
        inputs, targets = (torch.stack(part) for part in zip(*(self._data[place] for place in places), strict=True))
        self.model(inputs, targets).backward()


def make_gpt_training(state_nbytes: int) -> Training:
    """Return the training of a GPT whose weights and moments have about that size."""
    torch.manual_seed(0)
    # 12 x width^2 weights per layer, and two moments: 12 bytes for each weight.
    width = round((state_nbytes / (12 * 12 * LAYERS)) ** 0.5 / (2 * HEADS)) * 2 * HEADS
    work = Gpt(width)
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-3, fused=True)
    items: dict[str, Any] = {"model": work.model, "optimizer": optimizer}
    training = Training(items, list(work.model.parameters()), optimizer, _nothing, work)
    training.turn(_nothing)
    return training


def _nothing() -> None:
    return
