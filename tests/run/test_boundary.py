"""A boundary is the end of a turn with no backward since the last optimizer (or scaler) step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from resilient.run.boundary import BoundaryWatch


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.optimizer = torch.optim.SGD(self.one.parameters(), lr=0.1)
        self.other = torch.optim.Adam(self.two.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.watch = BoundaryWatch(
            {"one": self.one, "optimizer": self.optimizer, "other": self.other, "s": self.scaler}
        )

    def backward(self, factor: float = 1.0) -> None:
        (self.two(self.one(torch.ones(2, 3))).sum() * factor).backward()


def plain(training: Training) -> None:
    training.optimizer.zero_grad()
    training.other.zero_grad()
    training.backward()
    training.optimizer.step()
    training.other.step()


def zeroed_at_the_end(training: Training) -> None:
    training.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.other.zero_grad()


def zeroed_in_place(training: Training) -> None:
    training.backward()
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=False)
    training.other.zero_grad(set_to_none=False)


def accumulated_within_the_turn(training: Training) -> None:
    training.optimizer.zero_grad()
    for _ in range(3):
        training.backward()
    training.optimizer.step()
    training.other.step()


def scaled(training: Training) -> None:
    training.optimizer.zero_grad()
    training.scaler.scale(training.one(torch.ones(2, 3)).sum()).backward()
    training.scaler.step(training.optimizer)
    training.scaler.update()


def skip(training: Training) -> None:
    training.optimizer.zero_grad()
    training.scaler.scale(training.one(torch.full((2, 3), float("inf"))).sum()).backward()
    before = training.one.weight.clone()
    training.scaler.step(training.optimizer)
    training.scaler.update()
    assert torch.equal(training.one.weight, before)


def adversarial(training: Training) -> None:
    training.optimizer.zero_grad()
    training.other.zero_grad()
    training.backward()
    training.other.step()
    training.optimizer.zero_grad()
    training.backward()  # leaves gradients in the other model, too
    training.optimizer.step()
    training.other.zero_grad()


def no_training_at_all(training: Training) -> None:
    training.one(torch.ones(2, 3))


CLEAN = [
    plain,
    zeroed_at_the_end,
    zeroed_in_place,
    accumulated_within_the_turn,
    scaled,
    adversarial,
    no_training_at_all,
]


@pytest.mark.parametrize("turn", CLEAN, ids=lambda turn: str(turn.__name__))
@pytest.mark.parametrize("first", CLEAN, ids=lambda turn: str(turn.__name__))
def test_a_turn_that_uses_its_gradients_ends_at_a_boundary(
    first: Callable[[Training], None], turn: Callable[[Training], None]
) -> None:
    training = Training()
    for each in (first, turn, turn):
        each(training)
        training.watch.end_turn()
        assert not training.watch.pending()
        assert not training.watch.stepped


def step_first(training: Training) -> None:
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.backward()


def scaled_micro_batch(training: Training) -> None:
    training.scaler.scale(training.one(torch.ones(2, 3)).sum()).backward()


PENDING = [Training.backward, step_first, scaled_micro_batch]


@pytest.mark.parametrize("turn", PENDING, ids=lambda turn: str(turn.__name__))
@pytest.mark.parametrize("first", CLEAN, ids=lambda turn: str(turn.__name__))
def test_a_gradient_that_no_step_has_used_is_pending(
    first: Callable[[Training], None], turn: Callable[[Training], None]
) -> None:
    training = Training()
    first(training)
    training.watch.end_turn()
    if first is plain:
        training.optimizer.zero_grad()  # the next gradient may get the address of the one that was just freed
    turn(training)
    training.watch.end_turn()
    assert training.watch.pending()
    training.optimizer.step()
    training.other.step()
    assert training.watch.stepped
    assert not training.watch.pending()


def test_a_step_uses_the_gradients_of_its_own_optimizer_alone() -> None:
    training = Training()
    training.backward()
    training.optimizer.step()
    training.watch.end_turn()
    assert training.watch.pending()
    assert training.watch.only_left()
    training.backward()  # nobody has stepped since: these are not left, they are to come
    assert not training.watch.only_left()
    training.optimizer.step()
    training.other.step()
    training.watch.end_turn()
    assert not training.watch.pending()


def test_what_is_left_can_be_disregarded_and_what_is_to_come_cannot() -> None:
    training = Training()
    training.watch.disregard_left()
    training.backward()
    training.optimizer.step()
    assert not training.watch.pending()
    training.backward()
    assert training.watch.pending()


def test_a_step_that_the_scaler_leaves_out_has_used_the_gradients_of_the_only_optimizer() -> None:
    training = Training()
    training.watch = BoundaryWatch({"optimizer": training.optimizer, "scaler": training.scaler})
    skip(training)
    training.watch.end_turn()
    assert not training.watch.pending()


def test_a_step_that_the_scaler_leaves_out_has_not_used_what_another_optimizer_accumulates() -> None:
    training = Training()
    training.backward()
    skip(training)
    training.watch.end_turn()
    assert training.watch.pending()
    plain(training)
    training.watch.end_turn()
    assert not training.watch.pending()


@pytest.mark.parametrize("tracked", ["module", "dictionary"])
def test_without_an_optimizer_a_change_of_tensors_is_seen(tracked: str) -> None:
    model = nn.Linear(2, 2)
    watch = BoundaryWatch({"it": model if tracked == "module" else {"deep": [model.weight, 3]}})
    assert watch.blind
    assert not watch.changed()
    with torch.no_grad():
        model.weight.add_(1)
    assert watch.changed()
    watch.end_turn()
    assert not watch.changed()


def test_closing_takes_the_hooks_away() -> None:
    training = Training()
    training.watch.close()
    training.backward()
    training.optimizer.step()
    assert not training.watch.stepped
