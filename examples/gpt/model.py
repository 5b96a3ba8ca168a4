"""What the three examples share: a small GPT on bytes, and real text that every Python has: its standard library."""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- the name that everybody knows
from torch.utils.data import Dataset

CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 2


class Text(Dataset[tuple[Tensor, Tensor]]):
    """The sources of the standard library, as bytes: CONTEXT of them, and the same ones moved by one."""

    def __init__(self, max_nbytes: int = 4_000_000) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(path.read_bytes() for path in files)[:max_nbytes]
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).movedim(-3, 0).transpose(-2, -3)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(-2, -3).flatten(-2)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.places.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", default="gpt-run", help="where the checkpoints are: a directory or a URL")
    parser.add_argument("--steps", type=int, default=200, help="steps of the whole run, restarts included")
    parser.add_argument(
        "--every", type=lambda text: int(text) if text.isdecimal() else text, default="auto", help="20, 30s, auto, ..."
    )
    return parser.parse_args()


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
