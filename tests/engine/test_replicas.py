"""What several ranks hold under one name is compared at the start."""

from __future__ import annotations

import pytest
import torch

from resilient.engine.peers import Peers
from resilient.engine.replicas import check_replicas
from resilient.errors import ConflictError
from resilient.state.capture import capture
from tests.engine.rank_threads import on_ranks


def state(rank: int, *, odd: str = "") -> dict[str, object]:
    """Return what every rank holds alike, but for the entry called ``odd``, and one layer of its own."""
    tensors: dict[str, object] = {
        "weight": torch.arange(12.0).reshape(3, 4).t() + (rank if odd == "weight" else 0),
        "scalar": torch.tensor(rank if odd == "scalar" else 1),
        "flags": torch.tensor([True, rank == 1 if odd == "flags" else False]),
        "empty": torch.zeros(0, 3),
        f"layer{rank}": torch.full((2,), float(rank)),
    }
    return {"s": {**tensors, "lr": float(rank) if odd == "lr" else 0.1}}


def check(peers: Peers, odd: str) -> str:
    try:
        check_replicas(
            capture(state(peers.rank, odd=odd), rank=peers.rank, world_size=peers.world_size), peers, timeout_s=10
        )
    except ConflictError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("odd", ["weight", "scalar", "flags", "lr"])
def test_what_differs_is_refused_on_all_ranks_by_name(odd: str) -> None:
    said = on_ranks(3, lambda peers: check(peers, odd))
    assert said[0]
    assert said == [said[0]] * 3
    assert f"s.{odd} differs between rank 0 and rank 1" in str(said[0])


def test_equal_replicas_and_parts_of_ones_own_are_fine() -> None:
    assert on_ranks(3, lambda peers: check(peers, "")) == ["", "", ""]
