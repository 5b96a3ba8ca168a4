"""Loops that are not one backward, one step, to the end: left and entered again, several optimizers, none at all."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import resilient
from resilient.errors import ErrorKind, UsageError
from resilient.run import deferral
from resilient.run.sampler import ElasticSampler
from resilient.run.session import Run
from tests.run.test_session import Stop, loop


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("length", [1, 5])
def test_a_loop_that_is_always_left_on_a_due_step_is_saved_as_often(length: int, tmp_path: Path) -> None:
    def body(run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sampler: ElasticSampler) -> None:
        while run.step < 6:
            for _ in itertools.islice(run.steps(sampler), length):
                train_step(model, optimizer)
        raise Stop

    with pytest.raises(Stop):
        loop(tmp_path, body, every=5, keep=resilient.Keep(last=100))
    assert 5 in [found.step for found in resilient.checkpoints(tmp_path)]


def test_a_run_that_left_its_loop_on_a_due_step_is_complete(tmp_path: Path) -> None:
    seen = []

    def body(run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sampler: ElasticSampler) -> None:
        for _ in run.steps(sampler):
            train_step(model, optimizer)
            seen.append(run.step)
            if run.step == 4:
                break

    for _ in range(2):
        loop(tmp_path, body, every=5)
        assert seen == [0, 1, 2, 3, 4]


def test_one_break_between_backward_and_step_does_not_keep_later_steps_from_being_saved(tmp_path: Path) -> None:
    def body(run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sampler: ElasticSampler) -> None:
        for _ in run.steps(sampler):
            if run.step == 3:
                model(torch.ones(1, 2)).sum().backward()
                break
            train_step(model, optimizer)
        for _ in run.steps(sampler, total=8):
            if run.step == 5:
                run.save()
            train_step(model, optimizer)

    loop(tmp_path, body)
    assert [found.step for found in resilient.checkpoints(tmp_path)] == [8, 5]


def two_optimizers(place: Path, total: int, *, every: int = 2, stop: int = -1) -> torch.Tensor:
    """One optimizer steps in each turn, the other one in each fourth; return the weights of that one."""

    @resilient.train(place, every=every, keep=resilient.Keep(last=100))
    def main(run: Run) -> torch.Tensor:
        torch.manual_seed(0)
        often, seldom = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        a = torch.optim.SGD(often.parameters(), lr=0.01)
        b = torch.optim.SGD(seldom.parameters(), lr=0.01)
        sampler = ElasticSampler(100, global_batch=1, seed=0)
        run.track(often=often, seldom=seldom, a=a, b=b, data=sampler)
        for (number,) in run.steps(sampler, total=total):
            if run.step == stop:
                raise Stop
            seldom(often(torch.full((1, 2), number / 100))).square().sum().backward()
            a.step()
            a.zero_grad()
            if run.step % 4 == 3:
                b.step()
                b.zero_grad()
        return seldom.weight.detach().clone()

    return main()


def test_what_one_optimizer_accumulates_is_not_lost_in_a_save_after_a_step_of_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "resilient")
    whole = two_optimizers(tmp_path / "whole", 12, every=1000)
    with pytest.raises(Stop):
        two_optimizers(tmp_path / "run", 12, stop=7)
    assert [found.step for found in resilient.checkpoints(tmp_path / "run")] == [4]
    assert torch.equal(two_optimizers(tmp_path / "run", 12), whole)
    assert "gradients" not in caplog.text
    two_optimizers(tmp_path / "ends", 7)
    assert resilient.checkpoints(tmp_path / "ends")[0].step == 7
    assert "gradients that no step of their optimizer has used are not saved" in caplog.text


def test_gradients_that_no_turn_clears_put_saves_off_only_so_long_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "resilient")
    monkeypatch.setattr(deferral, "_MOST", 6)

    @resilient.train(tmp_path, every=2, keep=resilient.Keep(last=100))
    def main(run: Run) -> None:
        generator, critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        g = torch.optim.SGD(generator.parameters(), lr=0.01)
        c = torch.optim.SGD(critic.parameters(), lr=0.01)
        run.track(generator=generator, critic=critic, g=g, c=c)
        for _ in run.steps(range(20)):
            if run.step == 3:
                with pytest.raises(UsageError, match="no optimizer step has used") as caught:
                    run.save()
                assert "zero_grad() of every optimizer" in str(caught.value.hint)
            train_step(critic, c)
            g.zero_grad()
            critic(generator(torch.ones(1, 2))).sum().backward()
            g.step()

    main()
    steps = [found.step for found in resilient.checkpoints(tmp_path)]
    assert min(steps) == 8, "due at 2, put off from 2 to 7"
    assert sum("taken for discarded" in message for message in caplog.messages) == 1


class OwnOptimizer:
    """What hides an optimizer from the run."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, float]:
        return {"lr": float(self.optimizer.param_groups[0]["lr"])}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.optimizer.param_groups[0]["lr"] = state["lr"]


def test_without_an_optimizer_to_watch_a_save_after_the_step_is_refused_too(tmp_path: Path) -> None:
    @resilient.train(tmp_path, every=1000)
    def main(run: Run) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=OwnOptimizer(optimizer))
        torch.nn.init.zeros_(model.weight)  # before the first turn the program may do what it likes
        for _ in run.steps(range(3)):
            run.save()
            train_step(model, optimizer)
            with pytest.raises(UsageError, match="tensors that are tracked have changed since") as caught:
                run.save()
            assert caught.value.kind is ErrorKind.NOT_A_BOUNDARY

    main()
    assert [found.step for found in resilient.checkpoints(tmp_path)] == [3, 2, 1]


class Noise(Dataset[torch.Tensor]):
    """Nothing but augmentation."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(2)


def test_workers_draw_other_augmentations_in_each_epoch_and_the_same_after_a_resume(tmp_path: Path) -> None:
    def epochs(place: Path, stop: int = -1) -> dict[int, list[float]]:
        seen: dict[int, list[float]] = {}

        def body(run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sampler: ElasticSampler) -> None:
            torch.manual_seed(0)
            for batch in run.steps(DataLoader(Noise(), batch_sampler=sampler, num_workers=1), total=30):
                if run.step == stop:
                    run.save().wait(30)
                    raise Stop
                seen[run.step] = batch.flatten().tolist()
                train_step(model, optimizer)

        with contextlib.suppress(Stop):
            loop(place, body)
        return seen

    whole = epochs(tmp_path / "whole")
    assert len({tuple(whole[step]) for step in (0, 10, 20)}) == 3, "every epoch sees the same augmentations"
    assert {**epochs(tmp_path / "run", 10), **epochs(tmp_path / "run")} == whole


def test_a_finished_run_that_is_asked_for_pass_after_pass_is_an_error_instead_of_a_loop_without_end(
    tmp_path: Path,
) -> None:
    def train(epochs: int) -> None:
        def body(run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sampler: ElasticSampler) -> None:
            while sampler.epoch < epochs:
                for _ in run.steps(sampler):
                    train_step(model, optimizer)

        loop(tmp_path, body)

    train(2)
    train(2)
    with pytest.raises(UsageError, match="complete at step 20") as caught:
        train(4)
    assert "total=" in str(caught.value.hint)


def test_an_exit_within_a_turn_is_not_the_end_of_the_run(tmp_path: Path) -> None:
    """A signal's handler may call sys.exit between an optimizer's step and its scheduler's: a state of no step."""

    @resilient.train(tmp_path / "run", every=2)
    def main(run: resilient.Run, *, leave: bool) -> int:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        restored = run.track(model=model, optimizer=optimizer, scheduler=scheduler)
        assert scheduler.last_epoch == (restored.step if restored else 0)
        for _ in run.steps(range(5), total=5):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if leave and run.step == 3:
                sys.exit(0)
            scheduler.step()
        return run.step

    with pytest.raises(SystemExit):
        main(leave=True)
    assert [each.step for each in resilient.checkpoints(tmp_path / "run")] == [2]
    assert main(leave=False) == 5
