"""Ranks that hold different parts of a model, without a DTensor saying so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import resilient
from tests.ranks import Ranks


def stage(value: float) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    return {f"layer{rank}": torch.full((10,), value), "shared": torch.full((3,), 7.0)}


def save_stages(place: str) -> None:
    resilient.save(place, 1, {"model": stage(dist.get_rank() + 1.0)}).wait(60)


def load_stages(place: str) -> bool:
    into = stage(0.0)
    resilient.load(place, {"model": into})
    return bool((into[f"layer{dist.get_rank()}"] == dist.get_rank() + 1.0).all() and (into["shared"] == 7).all())


def load_without_the_first(place: str) -> str:
    into = stage(0.0) if dist.get_rank() else {"shared": torch.zeros(3)}
    with pytest.raises(resilient.ResilientError) as caught:
        resilient.load(place, {"model": into})
    assert not into["shared"].any() or dist.get_rank(), "a refused load changed its destination"
    return str(caught.value)


def test_each_stage_of_a_pipeline_gets_its_own_part_back(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(save_stages, str(tmp_path))
    assert ranks(2).run(load_stages, str(tmp_path)) == [True, True]


def test_what_no_rank_wants_is_refused_on_all_by_name(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(save_stages, str(tmp_path))
    said = ranks(2).run(load_without_the_first, str(tmp_path))
    assert all("layer0" in each and "layer1" not in each for each in said)
