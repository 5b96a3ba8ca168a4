"""Modules: the names that they would have without their wrappers, and all of their state, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from resilient.errors import ErrorKind, UsageError
from resilient.state.capture import capture
from resilient.state.names import canonical
from tests.state.tiny_engine import load, names, same, save

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*"
)  # torch.compile imports what torch deprecates


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone: what DDP needs."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2, bias=False)))


def compiled(module: nn.Module) -> nn.Module:
    wrapped: nn.Module = torch.compile(module)  # type: ignore[assignment] # nothing is compiled before the first call
    return wrapped


WRAPPINGS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "plain": lambda module: module,
    "ddp": DistributedDataParallel,
    "compiled": compiled,
    "ddp of compiled": lambda module: DistributedDataParallel(compiled(module)),
    "compiled ddp": lambda module: compiled(DistributedDataParallel(module)),
    "checkpointed": lambda module: nn.Sequential(
        checkpoint_wrapper(module[0]), module[1], checkpoint_wrapper(module[2])
    ),
    "compiled inside": lambda module: nn.Sequential(module[0], module[1], compiled(module[2])),
    "data parallel": nn.DataParallel,
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", WRAPPINGS)
@pytest.mark.field_report("BR-214")
def test_a_wrapped_module_has_its_plain_names_and_loads_into_any_other(kind: str) -> None:
    saved = save({"model": WRAPPINGS[kind](net(0))})
    assert {tensor.name for tensor in saved.manifest.tensors} == set(net(0).state_dict())
    for other in WRAPPINGS.values():
        inner = net(1)
        load(saved, {"model": other(inner)})
        assert same(dict(inner.state_dict()), dict(net(0).state_dict()))


@pytest.mark.usefixtures("alone")
@pytest.mark.field_report("BR-216")
def test_ddp_with_its_average_loads_into_plain_ones() -> None:
    average = AveragedModel(DistributedDataParallel(net(0)))
    average.update_parameters(DistributedDataParallel(net(2)))
    saved = save({"model": DistributedDataParallel(net(3)), "ema": average})
    plain, ema = net(1), AveragedModel(net(1))
    load(saved, {"model": plain, "ema": ema})
    assert same(dict(plain.state_dict()), dict(net(3).state_dict()))
    assert same(dict(ema.module.state_dict()), dict(average.get_submodule("module.module").state_dict()))
    assert int(ema.n_averaged) == 1


def test_an_attribute_of_its_own_called_like_a_wrappers_keeps_its_name() -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2, bias=False)
            self.weight = nn.Parameter(torch.ones(1))

    assert names(capture({"m": Owner()}, rank=0, world_size=1).tensors) == {"weight", "module.weight"}
    assert canonical("a.module._orig_mod.b._checkpoint_wrapped_module.weight") == "a.b.weight"
    assert canonical("module") == "module"


class Tied(nn.Module):
    def __init__(self, *, tied: bool, seed: int, head_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        for name, module in [("head", head), ("embedding", embedding)][:: 1 if head_first else -1]:
            self.add_module(name, module)
        self.inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        if tied:
            head.weight = embedding.weight
            self.inner[1] = self.inner[0]


@pytest.mark.parametrize("saved_tied", [True, False])
@pytest.mark.parametrize("load_tied", [True, False])
@pytest.mark.parametrize("head_first", [True, False])
@pytest.mark.field_report("BR-066")
def test_tied_weights_are_stored_once_and_load_with_and_without_ties(
    saved_tied: bool, load_tied: bool, head_first: bool
) -> None:
    source = Tied(tied=saved_tied, seed=0)
    saved = save({"m": source})
    num_elements = sum(parameter.numel() for parameter in source.parameters())  # without repetition
    assert saved.nbytes == 4 * num_elements
    assert {tensor.name for tensor in saved.manifest.tensors} == set(source.state_dict())
    into = Tied(tied=load_tied, seed=1, head_first=head_first)
    notices = load(saved, {"m": into})
    assert (into.embedding.weight is into.head.weight) == load_tied  # type: ignore[union-attr]
    got, wanted = dict(into.state_dict()), dict(source.state_dict())
    if load_tied and not saved_tied:
        assert len(notices) == 3  # the embedding, and two tensors of the inner layers
        assert any(same(got["head.weight"], wanted[name]) for name in ("head.weight", "embedding.weight"))
    else:
        assert same(got, wanted)
        assert not notices


class WithExtra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("transient", torch.ones(1), persistent=False)
        self.register_buffer("absent", None)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [{"scale": torch.ones(3), "n": [1, None]}, 5, {}, torch.ones(2)])
def test_extra_state_is_kept_and_transient_buffers_are_not(extra: Any) -> None:
    saved = save({"m": nn.Sequential(WithExtra(extra))})
    assert all("transient" not in tensor.name for tensor in saved.manifest.tensors)
    into = WithExtra({"scale": torch.zeros(3), "n": 0})
    load(saved, {"m": nn.Sequential(into)})
    assert same(into.extra, extra)


def test_a_module_that_saves_in_its_own_way_is_refused() -> None:
    class Packed(nn.Module):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            destination[prefix + "packed"] = torch.ones(1)

    with pytest.raises(UsageError, match=r"0\.inner.*Packed.*packed"):
        capture({"m": nn.Sequential(nn.ModuleDict({"inner": Packed()}))}, rank=0, world_size=1)


@pytest.mark.field_report("BR-068")
def test_expanded_and_frozen_tensors_of_a_module_are_restored() -> None:
    def make(value: float) -> nn.Module:
        module = nn.Linear(2, 2)
        module.weight.requires_grad_(False).fill_(value)
        module.register_buffer("positions", torch.full((1,), value).expand(3))
        return module

    into = make(1.0)
    weight = into.weight
    load(save({"m": make(2.0)}), {"m": into})
    assert into.weight is weight
    assert weight.eq(2).all()  # type: ignore[operator]
    assert into.positions.eq(2).all()  # type: ignore[operator]


def test_a_module_on_the_meta_device_cannot_be_loaded_into() -> None:
    with pytest.raises(UsageError) as caught, torch.device("meta"):
        load(save({"m": {"weight": torch.ones(2, 2)}}), {"m": nn.Linear(2, 2, bias=False)})
    assert caught.value.kind is ErrorKind.UNSAVEABLE
    assert "meta" in str(caught.value)


def test_a_modules_weights_load_into_a_plain_dictionary() -> None:
    module = nn.Sequential(nn.Linear(2, 3))
    into = {"0": {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}}
    load(save({"m": module}), {"m": into})
    assert torch.equal(into["0"]["weight"], module.get_parameter("0.weight"))
