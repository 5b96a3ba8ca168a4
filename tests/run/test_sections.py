"""Where a rank is, and how long its turns take: as seen by whoever watches it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import resilient
from resilient.detect.page import Owner, Page, PageView
from resilient.run.sections import Counter, NoMarks, Sections, Turn
from resilient.run.session import Run
from resilient.run.watch_compute import Compute
from resilient.run.watch_stragglers import medians_of
from tests.catalog.runs import HandClock


def test_turns_are_timed_by_what_they_wait_for_and_saves_are_no_part_of_a_step(tmp_path: Path) -> None:
    clock = HandClock()
    page = Page(tmp_path / "page", Owner(pid=1, rank=0, signal=0, thread=0), clock=clock)
    view = PageView(tmp_path / "page")
    sections = Sections(page)
    done = [0]
    seen: list[tuple[str, int]] = []

    def draw() -> object:
        seen.append((view.glance().section, view.glance().step))
        clock.sleep(0.25)
        return object()

    assert view.glance().section == "setup"
    for _ in sections.turns(lambda: iter(range(5)), lambda: done[0]):
        pass
    assert view.glance().section == "outside the loop"

    def batches() -> Iterator[object]:
        for _ in range(8):
            yield draw()

    for _ in sections.turns(batches, lambda: done[0]):
        seen.append((view.glance().section, view.glance().step))
        clock.sleep(2.0)
        with sections.within("save"):
            seen.append((view.glance().section, view.glance().step))
            clock.sleep(4.0)
        done[0] += 1
    assert seen[:3] == [("data", 0), ("step", 0), ("save", 0)]
    assert seen[-3:] == [("data", 7), ("step", 7), ("save", 7)]
    turns = sections.take()
    assert turns[-8:] == [Turn(0.25, None, 2.25)] * 8
    assert sections.take() == []
    assert view.seen()["step"].longest_s == 2.0


def test_without_anybody_who_watches_the_times_are_the_same() -> None:
    clock = HandClock()
    counter = Counter(clock)
    sections = Sections(NoMarks(clock), counter)
    for _ in sections.turns(lambda: iter(range(3)), lambda: 7):
        clock.sleep(2.0)
        with sections.within("save"):
            clock.sleep(4.0)
            with sections.within("eval"):
                clock.sleep(8.0)
    assert (counter.spent.turns, counter.spent.step, counter.spent.turn_s) == (3, 7, 6.0)


def test_the_first_steps_of_a_life_are_not_what_others_are_measured_by(tmp_path: Path) -> None:
    page = Page(tmp_path / "page", Owner(pid=1, rank=0, signal=0, thread=0))
    view = PageView(tmp_path / "page")
    sections = Sections(page)
    names = [view.glance().section for _ in sections.turns(lambda: iter(range(7)), lambda: 0)]
    assert names == ["first step", *["warm-up"] * 4, "step", "step"]
    assert view.seen()["step"].count == 2


def test_errors_say_in_which_section_they_were_after_which_step() -> None:
    sections = Sections(NoMarks())
    with sections.named("eval", lambda: 7):
        assert sections.name == "eval"
    with pytest.raises(ValueError, match="no") as raised, sections.named("eval", lambda: 7):
        raise ValueError("no")
    assert raised.value.__notes__ == ["in section 'eval', after step 7"]
    assert sections.name == ""


class Slow(torch.nn.Module):
    """Computes for a while, and its backward pass takes long after the first gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.early(x)
        time.sleep(0.02)
        out: torch.Tensor = self.late(Waits.apply(hidden))  # type: ignore[no-untyped-call]  # as torch has it
        return out


class Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)  # an exchange with others would be here
        return gradient


def test_what_is_computed_ends_with_the_first_gradient_and_one_hook_stays() -> None:
    model = Slow()
    compute = Compute({"model": model, "other": {"a": 1}})
    for turn in range(3):
        compute.begin()
        model(torch.ones(4)).backward()
        model.zero_grad()
        took_s = compute.end()
        assert took_s is not None
        assert 0.02 <= took_s < 0.15, f"turn {turn}"
        assert len(compute._hooks) == 1
    compute.begin()
    assert compute.end() is None, "nothing was computed in this turn"
    compute.close()
    assert not compute._hooks


def test_without_a_gradient_to_see_the_end_of_the_forward_pass_stands_for_it() -> None:
    model = Slow().requires_grad_(False)
    compute = Compute({"model": model})
    for _ in range(2):
        compute.begin()
        model(torch.ones(4))
        time.sleep(0.2)
        took_s = compute.end()
        assert took_s is not None
        assert 0.02 <= took_s < 0.15
    compute.close()


def test_a_median_is_made_only_of_what_all_turns_have() -> None:
    assert medians_of([Turn(1.0, 2.0, 5.0), Turn(3.0, 4.0, 9.0), Turn(2.0, 3.0, 7.0)]) == {
        "step": 7.0,
        "data": 2.0,
        "compute": 3.0,
    }
    assert medians_of([Turn(1.0, None, 5.0), Turn(3.0, 4.0, 9.0)]) == {"step": 7.0, "data": 2.0}


def test_a_run_goes_through_its_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    for name in ("turn_to", "enter"):

        def follow(page: Page, section: int, *rest: int, original: object = getattr(Page, name)) -> object:
            heard.append({number: name for name, number in page._names.items()}[section])
            return original(page, section, *rest)  # type: ignore[operator]  # the method itself

        monkeypatch.setattr(Page, name, follow)

    @resilient.train(tmp_path, every=2)
    def main(run: Run) -> None:
        run.track(state={"weight": torch.zeros(3)})
        for _ in run.steps(range(2)):
            with run.section("eval"):
                pass

    main()
    start = ["setup", "restore", "data", "first step", "eval", "data", "warm-up", "eval"]
    assert heard[: len(start)] == start
    assert heard[-2:] == ["end", "save"] or heard[-1] == "end"
    assert "outside the loop" in heard


def test_a_module_that_is_called_inside_of_a_compiled_function_stays_in_one_graph() -> None:
    module = torch.nn.Linear(2, 2)
    compute = Compute({"model": module})
    compute.begin()

    @torch.compile(backend="eager", fullgraph=True)
    def step(inputs: torch.Tensor) -> torch.Tensor:
        return module(inputs).sum()  # type: ignore[no-any-return]  # torch's call has no type

    step(torch.ones(2, 2)).backward()  # type: ignore[no-untyped-call]  # torch's
    assert compute.end() is not None, "by its gradients"
    compute.close()
