"""What one rank has of its own, and declared parts of a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam

from resilient.errors import ErrorKind, UsageError
from resilient.state.capture import capture
from resilient.state.prepare import prepare
from resilient.state.wrappers import PerRank, Shard
from tests.state.tiny_engine import Saved, merge, same, share


def saved_by(states: list[dict[str, Any]]) -> Saved:
    return merge([share(capture(state, rank=r, world_size=len(states))) for r, state in enumerate(states)])


def restore(saved: Saved, items: dict[str, Any], rank: int, ranks: int, *, strict: bool = True) -> list[str]:
    notices: list[str] = []
    saved.fill(prepare(items, saved.manifest, rank=rank, world_size=ranks, strict=strict, notices=notices))
    return notices


@pytest.mark.field_report("BR-073")
def test_state_per_rank_is_stored_per_rank() -> None:
    counts = [1, 3, 40]
    saved = saved_by([{"own": PerRank({"list": [torch.full((n,), float(n))] * 2, "n": n})} for n in counts])
    assert {tensor.rank for tensor in saved.manifest.tensors} == {0, 1, 2}
    for rank, n in enumerate(counts):
        into = {"list": [torch.zeros(n), torch.zeros(n)], "n": 0}
        restore(saved, {"own": PerRank(into)}, rank, 3)
        assert same(into, {"list": [torch.full((n,), float(n))] * 2, "n": n})


@pytest.mark.parametrize("ranks", [1, 4])
def test_another_number_of_ranks_cannot_take_over_what_each_rank_had(ranks: int) -> None:
    saved = saved_by([{"own": PerRank({"n": rank, "x": torch.ones(1)})} for rank in range(2)])
    for rank in range(ranks):
        with pytest.raises(UsageError, match=r"own: saved by 2 ranks.*restart on 2 ranks") as caught:
            restore(saved, {"own": PerRank({"n": 0, "x": torch.zeros(1)})}, rank, ranks)
        assert caught.value.kind is ErrorKind.MISMATCH
    into = {"n": 5, "x": torch.zeros(1)}
    assert restore(saved, {"own": PerRank(into)}, 0, ranks, strict=False)
    assert same(into, {"n": 0, "x": torch.ones(1)})


def test_what_was_saved_per_rank_is_not_taken_for_common_state_or_the_reverse() -> None:
    for one, other in ((PerRank, dict), (dict, PerRank)):
        saved = saved_by([{"own": one({"x": torch.ones(1)})} for _ in range(2)])
        with pytest.raises(UsageError, match=r"own: saved .*, wanted "):
            restore(saved, {"own": other({"x": torch.zeros(1)})}, 0, 2)


def test_a_module_and_its_optimizer_per_rank() -> None:
    def make(seed: int) -> tuple[nn.Module, Adam]:
        torch.manual_seed(seed)
        model = nn.Linear(2, 2)
        optimizer = Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model, optimizer

    made = [make(rank) for rank in range(2)]
    saved = saved_by([{"model": PerRank(model), "optimizer": PerRank(optimizer)} for model, optimizer in made])
    for rank, (model, optimizer) in enumerate(made):
        other, again = make(9)
        restore(saved, {"model": PerRank(other), "optimizer": PerRank(again)}, rank, 2)
        assert same(dict(other.state_dict()), dict(model.state_dict()))
        assert same(again.state_dict(), optimizer.state_dict())


def test_declared_parts_are_resharded() -> None:
    whole = torch.arange(40.0).reshape(8, 5)

    def parts(ranks: int, source: torch.Tensor) -> list[dict[str, Any]]:
        return [
            {
                "m": {
                    "expert": Shard(part.clone(), "expert", whole.shape, (8 // ranks * rank, 0)),
                    "mine": [Shard(torch.full((1,), float(rank)) + source[0, 0], f"only.{rank}", (1,), (0,))],
                    "common": torch.ones(2) + source[0, 0],
                    "n": ranks,
                }
            }
            for rank, part in enumerate(source.chunk(ranks))
        ]

    saved = saved_by(parts(4, whole))
    assert {leaf.name for leaf in saved.manifest.tensors} == {
        "expert",
        "common",
        *(f"only.{rank}" for rank in range(4)),
    }
    for ranks in (2, 4):
        got = parts(ranks, torch.full((8, 5), -1.0))
        for rank, items in enumerate(got):
            restore(saved, items, rank, ranks)
            assert torch.equal(items["m"]["mine"][0].tensor, torch.full((1,), float(rank)))
            assert items["m"]["n"] == 4
        assert torch.equal(torch.cat([items["m"]["expert"].tensor for items in got]), whole)
    with pytest.raises(UsageError, match=r"wanted by nothing here: m\.only\.1"):  # all names are known on one rank
        restore(saved, parts(1, torch.full((8, 5), -1.0))[0], 0, 1)


def test_several_parts_of_one_whole_on_one_rank() -> None:
    whole = torch.arange(6.0)
    saved = saved_by([{"m": {"a": Shard(whole[:2], "w", (6,), (0,)), "b": Shard(whole[2:], "w", (6,), (2,))}}])
    into = torch.zeros(6)
    restore(saved, {"m": {"all": Shard(into, "w", (6,), (0,))}}, 0, 1)
    assert torch.equal(into, whole)


def test_a_part_outside_its_whole_is_refused() -> None:
    for shape, offset in (((3,), (2,)), ((3, 1), (0, 0)), ((3,), (-1,))):
        with pytest.raises(UsageError, match="not inside"):
            Shard(torch.ones(2), "x", shape, offset)


def test_the_shape_of_the_whole_is_checked() -> None:
    saved = saved_by([{"m": {"a": Shard(torch.ones(4), "w", (4,), (0,))}}])
    with pytest.raises(UsageError, match=r"saved with shape \(4,\), wanted with shape \(8,\)"):
        restore(saved, {"m": {"a": Shard(torch.ones(4), "w", (8,), (0,))}}, 0, 1)


def test_a_part_cannot_have_the_name_of_a_plain_tensor() -> None:
    with pytest.raises(UsageError) as caught:
        capture({"m": {"w": torch.ones(1), "s": Shard(torch.ones(1), "w", (1,), (0,))}}, rank=0, world_size=1)
    assert caught.value.kind is ErrorKind.NAME_COLLISION
