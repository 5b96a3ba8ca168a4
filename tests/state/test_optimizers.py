"""Optimizers: state by parameter names, every group, exactly as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import LBFGS, SGD, Adadelta, Adafactor, Adagrad, Adam, AdamW, Optimizer

from resilient.errors import ErrorKind, UsageError
from resilient.state.capture import capture
from resilient.state.groups import continued
from tests.state.tiny_engine import load, same, save


def net(seed: int, *, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)).to(dtype)


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for seed in range(steps):
        data = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)

        def closure(data: torch.Tensor = data) -> float:
            optimizer.zero_grad()
            loss: torch.Tensor = model(data).square().mean()
            torch.autograd.backward(loss)
            return float(loss.item())

        optimizer.step(closure)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adam": lambda model: Adam(model.parameters(), lr=0.1),
    "adam fused": lambda model: Adam(model.parameters(), lr=0.1, fused=True),
    "adam foreach": lambda model: Adam(model.parameters(), lr=0.1, foreach=True, amsgrad=True),
    "adam single": lambda model: Adam(model.parameters(), lr=0.1, foreach=False),
    "adam with a tensor lr": lambda model: Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False),
    "adamw": lambda model: AdamW(model.parameters(), lr=0.1),
    "sgd": lambda model: SGD(model.parameters(), lr=0.1),
    "sgd momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda model: Adagrad(model.parameters(), lr=0.1),
    "adadelta": lambda model: Adadelta(model.parameters()),
    "adafactor": lambda model: Adafactor(model.parameters(), lr=0.1),  # state of other shapes than the parameter
    "lbfgs": lambda model: LBFGS(model.parameters(), lr=0.1),  # lists of tensors, and all under one parameter
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.field_report("BR-063", "BR-095")
def test_training_goes_on_as_if_uninterrupted(kind: str, dtype: torch.dtype, fresh: bool) -> None:
    model = net(0, dtype=dtype)
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer, 3)
    saved = save({"model": model, "optimizer": optimizer})
    other = net(1, dtype=dtype)
    again = OPTIMIZERS[kind](other)
    if not fresh:
        train(other, again, 1)  # its state is filled in place
    held = [value for state in again.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    assert not load(saved, {"model": other, "optimizer": again})
    assert same(again.state_dict(), optimizer.state_dict())
    if not fresh and kind != "lbfgs":
        now = [value for state in again.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
        assert all(a is b for a, b in zip(held, now, strict=True))
    train(model, optimizer, 5)
    train(other, again, 5)
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def grouped(model: nn.Sequential, order: list[int], **later: Any) -> Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": list(model[0].parameters()), "lr": 0.1, "weight_decay": 0.5},
        {"params": list(model[1].parameters()), "lr": 0.2, "betas": (0.5, 0.6)},
        {"params": [], "lr": 0.3},
        {"params": list(model[2].parameters()), "lr": 0.4, "custom": {"name": "head"}, **later},
    ]
    return AdamW([copy.copy(groups[index]) for index in order], lr=1.0)


@pytest.mark.field_report("BR-070")
def test_every_key_of_every_group_is_restored_an_empty_one_too() -> None:
    model = net(0)
    optimizer = grouped(model, [0, 1, 2, 3])
    train(model, optimizer, 1)
    for group in optimizer.param_groups:
        group["lr"] *= 7
    other = net(1)
    again = AdamW([{"params": list(part.parameters())} for part in (other[0], other[1])] + [{"params": []}], lr=1.0)
    again.add_param_group({"params": list(other[2].parameters())})
    load(save({"model": model, "optimizer": optimizer}), {"model": other, "optimizer": again})
    assert same(again.state_dict(), optimizer.state_dict())
    train(other, again, 1)


def test_groups_and_parameters_in_another_order_are_matched_by_name() -> None:
    model = net(0)
    optimizer = grouped(model, [0, 1, 2, 3])
    train(model, optimizer, 1)
    other = net(1)
    again = grouped(other, [3, 2, 0, 1])
    again.param_groups[2]["params"].reverse()
    load(save({"model": model, "optimizer": optimizer}), {"model": other, "optimizer": again})
    assert [group["lr"] for group in again.param_groups] == [0.4, 0.3, 0.1, 0.2]
    assert again.param_groups[0]["custom"] == {"name": "head"}
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert same(again.state[theirs], optimizer.state[mine])


def test_names_that_torch_keeps_beside_the_parameters_stay_beside_them() -> None:
    model, other = net(0), net(1)
    saved = save({"model": model, "optimizer": Adam(model.named_parameters())})
    again = Adam(list(other.named_parameters())[::-1])
    load(saved, {"model": other, "optimizer": again})
    assert again.param_groups[0]["param_names"] == [name for name, _ in other.named_parameters()][::-1]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), max_size=8), st.permutations(range(4)))
def test_groups_continue_the_ones_that_their_parameters_were_in(homes: list[int], order: list[int]) -> None:
    saved = [[f"p{i}" for i, home in enumerate(homes) if home == group] for group in range(4)]
    now = [list(reversed(saved[group])) for group in order]
    found = continued(now, saved)
    for group, sources in zip(order, found, strict=True):
        assert len(sources) == 1
        assert sources == (group,) if saved[group] else not saved[sources[0]]


def test_a_group_of_parameters_from_several_groups_is_a_mismatch() -> None:
    model = net(0)
    optimizer = grouped(model, [0, 1, 2, 3])
    with pytest.raises(UsageError, match=r"optimizer\.param_groups\.0: its parameters were in the groups 0, 1, 3"):
        load(save({"model": model, "optimizer": optimizer}), {"model": model, "optimizer": SGD(model.parameters())})


@pytest.mark.parametrize(
    "step",
    [
        7,
        7.5,
        torch.tensor(7.0),
        torch.tensor([7.0]),
        torch.tensor(7, dtype=torch.int32),
        torch.tensor(2.0**24 + 1).double() + 1,
    ],
)
@pytest.mark.field_report("BR-065", "BR-098", "BR-101")
def test_step_is_restored_where_it_was_with_type_and_value(step: Any) -> None:
    def make(value: Any) -> tuple[nn.Module, Optimizer]:
        model = nn.Linear(1, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        if value is not None:
            optimizer.state[model.weight] = {"step": value, "nested": {"slow": torch.ones(1, 1), "n": [1]}}
            optimizer.param_groups[0]["step"] = value
            optimizer.state["global"] = {"step": value}  # type: ignore[index] # torch allows it, its types do not
        return model, optimizer

    model, optimizer = make(step)
    saved = save({"model": model, "optimizer": optimizer})
    for present in (None, step):
        other, again = make(copy.deepcopy(present))
        load(saved, {"model": other, "optimizer": again})
        assert same(again.state[other.weight], optimizer.state[model.weight])  # type: ignore[index]
        assert same(again.param_groups[0]["step"], step)
        assert same(again.state["global"], {"step": step})  # type: ignore[index]


@pytest.mark.parametrize("flag", ["fused", "capturable", None])
@pytest.mark.field_report("BR-097")
def test_step_goes_to_the_device_that_the_optimizer_needs(flag: str | None) -> None:
    model = net(0)
    optimizer = Adam(model.parameters(), fused=flag == "fused")
    train(model, optimizer, 1)
    saved = save({"model": model, "optimizer": optimizer})
    other = net(1)
    again = Adam(other.parameters(), fused=flag == "fused")
    load(saved, {"model": other, "optimizer": again})
    for parameter in other.parameters():
        assert again.state[parameter]["step"].device == parameter.device
        assert again.state[parameter]["step"].dtype == torch.float32
    train(other, again, 1)


def test_a_capturable_learning_rate_is_filled_in_place() -> None:
    def make(lr: float) -> tuple[nn.Module, Optimizer]:
        model = nn.Linear(1, 1)
        return model, Adam(
            model.parameters(), lr=torch.tensor(lr), betas=(torch.tensor(0.8), torch.tensor(0.9)), foreach=False
        )

    model, optimizer = make(0.25)
    other, again = make(0.5)
    lr = again.param_groups[0]["lr"]
    load(save({"model": model, "optimizer": optimizer}), {"model": other, "optimizer": again})
    assert again.param_groups[0]["lr"] is lr
    assert lr == 0.25
    plain = Adam(other.parameters(), lr=0.5)
    load(save({"model": model, "optimizer": optimizer}), {"model": other, "optimizer": plain})
    assert same(plain.param_groups[0]["lr"], torch.tensor(0.25))


@pytest.mark.parametrize("in_optimizer", [True, False])
@pytest.mark.field_report("BR-068")
def test_frozen_then_and_not_now_or_the_reverse_is_matched_by_name_and_reported(in_optimizer: bool) -> None:
    def make(seed: int, frozen: int) -> tuple[nn.Sequential, Optimizer]:
        model = net(seed)
        model[frozen].requires_grad_(False)
        parameters = [p for p in model.parameters() if in_optimizer or p.requires_grad]
        optimizer = Adam(parameters, lr=0.1)
        train(model, optimizer, 2)
        return model, optimizer

    model, optimizer = make(0, frozen=0)
    other, again = make(1, frozen=2)
    notices = load(save({"model": model, "optimizer": optimizer}), {"model": other, "optimizer": again})
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(again.state[other.get_parameter("1.weight")], optimizer.state[model.get_parameter("1.weight")])
    assert other.get_parameter("0.weight") not in again.state, (
        "a newly trained parameter kept the state of another life"
    )
    assert any("model.0.weight" in line for line in notices)
    if in_optimizer:
        assert same(again.state[other.get_parameter("2.weight")], optimizer.state[model.get_parameter("2.weight")])
        assert any("model.2.weight has state of training, and is frozen now" in line for line in notices)
    else:
        assert any("model.2.weight is frozen now" in line for line in notices)
    train(other, again, 1)


@pytest.mark.field_report("BR-081")
def test_a_parameter_that_is_trained_but_not_optimized_any_more_is_a_mismatch() -> None:
    model = net(0)
    optimizer = Adam(model.parameters())
    train(model, optimizer, 1)
    saved = save({"model": model, "optimizer": optimizer})
    other = net(1)
    with pytest.raises(UsageError, match=r"wanted by nothing here: optimizer\.state\.model\.2\.weight\.exp_avg"):
        load(saved, {"model": other, "optimizer": Adam(list(other.parameters())[:4])})
    larger = nn.Sequential(*net(1), nn.Linear(2, 2))
    before = copy.deepcopy(larger.state_dict())
    again = Adam(larger.parameters())
    with pytest.raises(UsageError, match=r"(?s)model\.3\.weight.*optimizer\.state\.model\.3\.weight"):
        load(saved, {"model": larger, "optimizer": again})
    assert same(dict(larger.state_dict()), dict(before))
    assert not again.state
    notices = load(saved, {"model": larger, "optimizer": again}, strict=False)
    assert sum("model.3" in line for line in notices) == 4
    assert same(again.state[larger.get_parameter("2.bias")], optimizer.state[model.get_parameter("2.bias")])


def test_state_of_another_dtype_or_shape_is_never_cast() -> None:
    model = net(0)
    optimizer = Adam(model.parameters())
    train(model, optimizer, 1)
    optimizer.state[model.get_parameter("0.weight")]["exp_avg"] = torch.ones(4, 3, dtype=torch.float64)
    optimizer.state[model.get_parameter("0.bias")]["exp_avg"] = torch.ones(2)
    other = net(1)
    again = Adam(other.parameters())
    train(other, again, 1)
    load(save({"model": model, "optimizer": optimizer}), {"model": other, "optimizer": again})
    assert same(again.state_dict(), optimizer.state_dict())


def test_a_parameter_that_no_module_owns_is_refused() -> None:
    model = net(0)
    for items in (
        {"optimizer": SGD(model.parameters())},
        {"model": net(0), "optimizer": SGD(model.parameters())},
    ):
        with pytest.raises(UsageError) as caught:
            capture(items, rank=0, world_size=1)
        assert caught.value.kind is ErrorKind.UNOWNED_PARAMETER


def test_two_modules_with_equal_names_and_one_optimizer() -> None:
    one, two = net(0), net(1)
    optimizer = Adam([*two.parameters(), *one.parameters()])
    train(one, optimizer, 1)
    train(two, optimizer, 1)
    saved = save({"one": one, "two": two, "optimizer": optimizer})
    first, second = net(2), net(3)
    again = Adam([*first.parameters(), *second.parameters()])
    load(saved, {"one": first, "two": second, "optimizer": again})
    assert same(again.state[second.get_parameter("0.weight")], optimizer.state[two.get_parameter("0.weight")])
    assert same(again.state[first.get_parameter("0.weight")], optimizer.state[one.get_parameter("0.weight")])


def test_tied_parameters_keep_their_state_whichever_name_comes_first() -> None:
    class Tied(nn.Module):
        def __init__(self, order: list[str]) -> None:
            super().__init__()
            for name in order:
                self.add_module(name, nn.Linear(2, 2, bias=False))
            self.get_submodule(order[1]).weight = self.get_submodule(order[0]).weight

    def make(order: list[str], steps: int) -> tuple[Tied, Optimizer]:
        model = Tied(order)
        optimizer = Adam(model.parameters())
        for _ in range(steps):
            torch.autograd.backward(next(model.parameters()).sum())
            optimizer.step()
        return model, optimizer

    model, optimizer = make(["a", "b"], 2)
    other, again = make(["b", "a"], 0)
    assert not load(save({"m": model, "o": optimizer}), {"m": other, "o": again})
    assert same(again.state[next(other.parameters())], optimizer.state[next(model.parameters())])
