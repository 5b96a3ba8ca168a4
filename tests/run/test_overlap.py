"""What is copied while the next turn runs is the state of the boundary all the same: 1,000 random turns of the loop."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import resilient
from resilient.engine.stage import Staging
from resilient.errors import StoreError
from resilient.run.overlap import Overlap
from resilient.state.capturer import Capturer
from resilient.state.rng import Rng
from resilient.state.wrappers import AfterStep
from tests.engine.staging import Bytes, Staged, live
from tests.ranks import Ranks, cpu_mesh

OPTIMIZERS: Final[dict[str, Callable[[Any], Optimizer]]] = {
    "adam fused": lambda parameters: Adam(parameters, lr=0.1, fused=True),
    "adamw foreach": lambda parameters: AdamW(parameters, lr=0.1, foreach=True, amsgrad=True),
    "adam single": lambda parameters: Adam(parameters, lr=0.1, foreach=False),
    "adam with a tensor lr": lambda parameters: Adam(parameters, lr=torch.tensor(0.1), foreach=False),
    "sgd fused": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": lambda parameters: Adagrad(parameters, lr=0.1),
    "rmsprop": lambda parameters: RMSprop(parameters, lr=0.1, momentum=0.5, foreach=True),
}


class Net(nn.Module):
    """Has parameters of several layouts, frozen ones, and buffers that its forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.convolution = nn.Conv1d(64, 64, 1)
        self.base = nn.Linear(64, 50)
        self.base.requires_grad_(False)
        self.last = nn.Linear(50, 3)
        self.first.weight.data = self.first.weight.data.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolution(self.norm(self.first(x)).unsqueeze(-1)).squeeze(-1)
        found: torch.Tensor = self.last(self.base(x)).square().mean()
        return found


class Loop:
    """A training with what `resilient` does at its boundaries, and nothing that runs by itself."""

    def __init__(self, kind: str, *, held: bool) -> None:
        self.model = Net()
        self.optimizer = OPTIMIZERS[kind]([each for each in self.model.parameters() if each.requires_grad])
        self.average = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        self.declared = {name: each.clone() for name, each in self.average.items()}
        self.items = {
            "model": self.model,
            "optimizer": self.optimizer,
            "average": self.average,
            "declared": AfterStep(self.declared),
            "rng": Rng(),
        }
        self.overlap = Overlap(self.items)
        self.capturer = Capturer(self.items, rank=0, world_size=1)
        self.staged = Staged(held=held, chunk_nbytes=4096)

    def backward(self) -> None:
        torch.autograd.backward(self.model(torch.randn(6, 64)))

    def step(self) -> None:
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.declared[name].lerp_(parameter, 0.1)

    def turn(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.step()
        self.overlap.end_turn()

    def save(self) -> tuple[Staging, Bytes]:
        captured = self.capturer.capture()
        boundary = live(captured)
        staging = self.staged.stage(captured, self.overlap.leaves(captured))
        self.overlap.watch(staging)
        return staging, boundary

    def close(self) -> None:
        self.overlap.close()
        self.staged.close()


@contextmanager
def loop(kind: str = "adam fused", *, held: bool = True) -> Iterator[Loop]:
    made = Loop(kind, held=held)
    try:
        made.turn()
        yield made
    finally:
        made.close()


def any_parameter(run: Loop, draw: random.Random) -> nn.Parameter:
    return draw.choice(list(run.model.parameters()))


def swapped(run: Loop, draw: random.Random) -> None:
    for parameter in run.model.parameters():
        parameter.data = parameter.data + 1


def offloaded(run: Loop, draw: random.Random) -> None:
    run.model.double()
    run.model.float()


def dropped(run: Loop, draw: random.Random) -> None:
    run.model.first = nn.Linear(64, 64)
    run.model.base = nn.Linear(64, 50)
    run.optimizer.state.clear()
    gc.collect()


def averaged(run: Loop, draw: random.Random) -> None:
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            run.average[name].lerp_(parameter.data + 1, 0.5)


def counted(run: Loop, draw: random.Random) -> None:
    for state in run.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] += 1


def stepped_by_another(run: Loop, draw: random.Random) -> None:
    run.backward()
    SGD(run.model.parameters(), lr=0.5).step()


def fenced(run: Loop, draw: random.Random) -> None:
    run.overlap.fence()
    with torch.no_grad():
        for tensor in (*run.model.parameters(), *run.declared.values()):
            tensor.data.zero_()


LAWFUL: Final[dict[str, Callable[[Loop, random.Random], object]]] = {
    "forward and backward": lambda run, draw: run.backward(),
    "a step": lambda run, draw: run.step(),
    "a turn": lambda run, draw: run.turn(),
    "gradients dropped": lambda run, draw: run.optimizer.zero_grad(set_to_none=True),
    "gradients zeroed": lambda run, draw: run.optimizer.zero_grad(set_to_none=False),
    "storages swapped": swapped,
    "offloaded": offloaded,
    "dropped": dropped,
    "averaged": averaged,
    "counted": counted,
    "optimizer loaded": lambda run, draw: run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict())),
    "learning rate": lambda run, draw: run.optimizer.param_groups[0].update(lr=draw.random()),
    "buffers": lambda run, draw: [buffer.zero_() for buffer in run.model.buffers()],
    "random numbers": lambda run, draw: torch.rand(3),
    "another optimizer": stepped_by_another,
    "fenced": fenced,
}
"""What a program may do after a boundary: the save succeeds."""

UNLAWFUL: Final[dict[str, Callable[[Loop, random.Random], object]]] = {
    "a parameter in place": lambda run, draw: any_parameter(run, draw).detach().add_(1),
    "a parameter through data": lambda run, draw: any_parameter(run, draw).data.mul_(1.01),
    "a parameter through numpy": lambda run, draw: any_parameter(run, draw).detach().numpy().__iadd__(1),
    "a frozen one": lambda run, draw: run.model.base.weight.data.mul_(0.99).add_(0.01),
    "model loaded": lambda run, draw: run.model.load_state_dict(Net().state_dict()),
    "state": lambda run, draw: [
        value.data.add_(1) for state in run.optimizer.state.values() for value in state.values() if value is not None
    ],
    "declared wrongly": lambda run, draw: [value.data.add_(1) for value in run.declared.values()],
}
"""What no fence sees: the save succeeds with the values of the boundary, or fails by name."""


@pytest.mark.proof
@pytest.mark.field_report("BR-036", "BR-037")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_is_staged_is_the_state_of_the_boundary(kind: str, count: Callable[[int, int], int]) -> None:
    for seed in range(count(6, 125)):
        draw = random.Random(f"{kind} {seed}")
        torch.manual_seed(seed)
        lawful = draw.random() < 0.6
        changes = draw.sample(sorted(LAWFUL), 3)
        if not lawful:
            changes.insert(draw.randrange(4), draw.choice(sorted(UNLAWFUL)))
        if seed == 0:
            lawful, changes = True, ["a step"]  # in every kind, while nothing is copied yet
        with loop(kind, held=seed == 0 or draw.random() < 0.7) as run:
            staging, boundary = run.save()
            for name in changes:
                (LAWFUL | UNLAWFUL)[name](run, draw)
            error = run.staged.ended(staging)
            if error is None:
                assert run.staged.bytes() == boundary, changes
            else:
                assert not lawful, (changes, error)
                assert isinstance(error, StoreError)
                assert staging.torn


@pytest.mark.parametrize("change", UNLAWFUL)
def test_what_was_torn_never_overlaps_again(change: str) -> None:
    with loop() as run:
        staging, _ = run.save()
        UNLAWFUL[change](run, random.Random(0))
        assert run.staged.ended(staging) is not None
        run.turn()
        found = overlapping(run)
        assert staging.torn
        assert not found & {f"{item}.{name}" for item, name in staging.torn}
        assert found, "the others still do"
        staging, boundary = run.save()
        UNLAWFUL[change](run, random.Random(0))
        assert run.staged.ended(staging) is None
        assert run.staged.bytes() == boundary


def overlapping(run: Loop) -> set[str]:
    captured = run.capturer.capture()
    leaves = [captured.tensors[number] for number in run.overlap.leaves(captured)]
    return {f"{leaf.item}.{leaf.name}" for leaf in leaves}


DECLARED: Final = [f"declared.{name}.weight" for name in ("first", "convolution", "base")]


def test_only_what_a_step_changes_overlaps() -> None:
    with loop() as run:
        weights = [f"model.{name}.weight" for name in ("first", "convolution")]
        states = [f"optimizer.state.{name}.{state}" for name in weights for state in ("exp_avg", "exp_avg_sq")]
        assert overlapping(run) == {*weights, *states, "model.base.weight", *DECLARED}


def test_a_turn_without_a_call_of_step_overlaps_nothing_but_what_never_steps() -> None:
    with loop() as run:
        run.backward()  # and then, say, a CUDA graph is replayed
        run.overlap.end_turn()
        assert overlapping(run) == {"model.base.weight", *DECLARED}
        run.turn()
        assert "model.first.weight" in overlapping(run)


def test_a_parameter_that_is_no_longer_frozen_does_not_count_as_frozen() -> None:
    with loop() as run:
        assert "model.base.weight" in overlapping(run)
        run.model.base.weight.requires_grad_(True)
        assert "model.base.weight" not in overlapping(run)


def test_a_frozen_module_of_its_own_does_not_overlap() -> None:
    teacher = Net().requires_grad_(False)  # an average of the student may be kept in it
    overlap = Overlap({"teacher": teacher})
    capturer = Capturer({"teacher": teacher}, rank=0, world_size=1)
    overlap.end_turn()
    assert not overlap.leaves(capturer.capture())
    overlap.close()


def test_overlapping_can_be_turned_off() -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    overlap = Overlap({"model": model, "optimizer": optimizer}, enabled=False)
    optimizer.step()
    overlap.end_turn()
    assert not overlap.leaves(Capturer({"model": model}, rank=0, world_size=1).capture())
    overlap.close()


def test_every_step_of_any_optimizer_waits_until_the_hooks_are_removed() -> None:
    with loop() as run:
        staging, _ = run.save()
        waits: list[float] = []
        fence = staging.fence

        def counted_fence() -> float:
            waits.append(fence())
            return waits[-1]

        staging.fence = counted_fence  # type: ignore[method-assign]
        stranger = SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        stranger.step()
        stranger.step()
        assert len(waits) == 1
        assert run.overlap.waited_s == sum(waits) > 0
        run.overlap.watch(staging)
        run.overlap.close()
        assert len(waits) == 2
        run.overlap.watch(staging)
        stranger.step()
        assert len(waits) == 2
        run.overlap._staging = None


def sharded_parameters_of_the_boundary() -> tuple[bool, int]:
    torch.manual_seed(0)
    model = Net()
    model.first = nn.Linear(64, 64)
    for layer in (model.first, model.base, model):
        fully_shard(layer, mesh=cpu_mesh((2,)), reshard_after_forward=False)
    for each in model.modules():
        getattr(each, "set_reshard_after_backward", lambda _: None)(False)
    optimizer = AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
    items = {"model": model, "optimizer": optimizer}
    overlap = Overlap(items)
    rank = torch.distributed.get_rank()
    capturer = Capturer(items, rank=rank, world_size=2)
    staged = Staged(held=True)
    same = True
    chosen: frozenset[int] = frozenset()
    for _ in range(3):
        torch.autograd.backward(model(torch.randn(6, 64)))
        optimizer.step()
        overlap.end_turn()
        captured = capturer.capture()
        boundary = live(captured)
        chosen = overlap.leaves(captured)
        staging = staged.stage(captured, chosen, rank=rank, world_size=2)
        overlap.watch(staging)
        torch.autograd.backward(model(torch.randn(6, 64)))  # gathers what is sharded, and keeps it
        optimizer.step()
        overlap.end_turn()
        same &= staged.ended(staging) is None
        same &= staged.bytes().items() <= boundary.items()
    overlap.close()
    staged.close()
    return same, len(chosen)


def test_sharded_parameters_are_those_of_the_boundary_where_fsdp_keeps_whole_ones(ranks: Ranks) -> None:
    for same, overlapped in ranks(2).run(sharded_parameters_of_the_boundary):
        assert same
        assert overlapped > 0


def test_a_save_outside_of_the_loop_is_copied_when_it_returns(tmp_path: Path) -> None:
    """Nothing fences there: a change that no version counts would else be stored as the boundary's."""

    @resilient.train(tmp_path / "run", every=1)
    def main(run: resilient.Run) -> torch.Tensor:
        model = torch.nn.Embedding(4000, 1000)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for _ in run.steps(range(100), total=6):
            model(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.step == 4:
                break
        boundary = model.weight.detach().clone()
        handle = run.save()
        model.weight.data[3990] = 7.0
        handle.wait(60)
        return boundary

    boundary = main()
    assert torch.equal(torch.as_tensor(resilient.checkpoints(tmp_path / "run")[0].tensor("model.weight")), boundary)
