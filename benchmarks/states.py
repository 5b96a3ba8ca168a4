"""What is saved in the benchmarks: states of a given size, and how they change between two saves."""

from __future__ import annotations

import torch
from measuring import MIB
from torch import Tensor

State = dict[str, Tensor]


def dense_state(nbytes: int, *, seed: int = 0) -> State:
    """Return float32 tensors as a transformer has them: for every large one (16 MiB) a small one (16 KiB)."""
    generator = torch.Generator().manual_seed(seed)
    large, small = 4 * MIB, 4096  # elements
    blocks = max(1, round(nbytes / (4 * large * 4)))
    large = nbytes // (blocks * 16) - small
    return {
        f"block{block}.{kind}{number}": torch.empty(size).normal_(generator=generator)
        for block in range(blocks)
        for kind, size in (("weight", large), ("norm", small))
        for number in range(4)
    }


def small_tensors(count: int, *, elements: int = 256, seed: int = 0) -> State:
    """Return so many small float32 tensors (1 KiB each)."""
    values = torch.empty(count, elements).normal_(generator=torch.Generator().manual_seed(seed))
    return {f"expert{number}.bias": row.clone() for number, row in enumerate(values)}


def like_trained(nbytes: int, *, seed: int = 0) -> State:
    """Return bfloat16 weights with the exponents of trained ones: normally distributed around zero."""
    generator = torch.Generator().manual_seed(seed)
    count = max(20, nbytes // (16 * MIB))
    elements = nbytes // count // 2
    return {
        f"layer{number:03d}.weight": (0.02 * torch.empty(elements).normal_(generator=generator)).bfloat16()
        for number in range(count)
    }


@torch.no_grad()
def change(state: State) -> None:
    """Give every element another value: a save that finds something unchanged may leave it out."""
    for tensor in state.values():
        getattr(tensor, "_local_tensor", tensor).mul_(1.01)


def nbytes_of(state: State) -> int:
    """Return the size of what this process holds of a state."""
    return sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in state.values())


def some_names(state: State) -> list[str]:
    """Return the first, the middle and the last name, and a small tensor's: those that a check reads back."""
    names = sorted(state)
    smallest = min(names, key=lambda name: state[name].nbytes)
    return sorted({names[0], names[len(names) // 2], names[-1], smallest})


def check_equal(name: str, found: Tensor, expected: Tensor) -> None:
    """Refuse what was not saved.

    Raises:
        ValueError: the tensors differ.
    """
    if found.shape != expected.shape or not torch.equal(found, expected):
        raise ValueError(f"{name} was not saved as it was: no figure of this save counts")
