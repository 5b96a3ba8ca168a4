"""What a run continues from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Which checkpoint a run continues from; ``world_size`` is the number of ranks that saved it."""

    step: int
    generation: int
    world_size: int
    items: tuple[str, ...]
