"""Random state: each rank its own, bit for bit; a new rank's by rule."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resilient.state.capture import capture
from resilient.state.prepare import prepare
from resilient.state.rng import Rng
from tests.state.tiny_engine import Saved, merge, same, save, share


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    """Leave the global generators as they were."""
    before = Rng().snapshot()
    yield
    Rng().restore(before, step=0, rank=0)


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def draw() -> list[Any]:
    python = [random.random(), random.gauss(0, 1), random.getrandbits(200)]
    numpy = [np.random.rand(), np.random.standard_normal(), np.random.randint(1 << 30)]
    return [*python, *numpy, torch.rand(3).tolist(), torch.randn(17).tolist(), torch.randperm(9).tolist()]


def saved_by(ranks: int, step: int = 5) -> tuple[Saved, list[list[Any]]]:
    """Save as so many ranks; return what each draws next."""
    shares, following = [], []
    for rank in range(ranks):
        seed(100 + rank)
        draw()  # leaves a spare normal number in the generators
        shares.append(share(capture({"rng": Rng()}, rank=rank, world_size=ranks)))
        following.append(draw())
    return merge(shares, step), following


def restored(saved: Saved, rank: int, ranks: int) -> list[Any]:
    seed(999 + rank)
    saved.fill(prepare({"rng": Rng()}, saved.manifest, rank=rank, world_size=ranks, notices=[]))
    return draw()


def test_every_rank_goes_on_with_its_own_numbers() -> None:
    saved, following = saved_by(3)
    assert [restored(saved, rank, 3) for rank in range(3)] == following
    assert restored(saved, 1, 2) == following[1], "fewer ranks: those that are left keep theirs"


@pytest.mark.field_report("BR-108", "BR-109")
def test_new_ranks_get_numbers_of_their_own_the_same_at_every_restart() -> None:
    saved, following = saved_by(2)
    first = [restored(saved, rank, 4) for rank in range(4)]
    assert [restored(saved, rank, 4) for rank in range(4)] == first
    assert first[:2] == following
    for row in range(len(first[0])):
        assert len({repr(numbers[row]) for numbers in first}) == 4, "two ranks draw the same"
    later, _ = saved_by(2, step=6)
    assert restored(later, 3, 4) != first[3]


@pytest.mark.field_report("BR-129")
def test_random_state_is_set_last() -> None:
    class Drawing:
        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            draw()

    seed(1)
    saved = save({"rng": Rng(), "other": Drawing()})
    wanted = draw()
    saved.fill(prepare({"rng": Rng(), "other": Drawing()}, saved.manifest, rank=0, world_size=1, notices=[]))
    assert draw() == wanted


def test_a_snapshot_is_tensors_and_numbers_and_not_changed_by_drawing() -> None:
    before = Rng().snapshot()
    again = Rng().snapshot()
    draw()
    assert same(before, again)
    assert not same(before, Rng().snapshot())
    assert "accelerator" in before or not torch.accelerator.is_available()


def test_a_snapshot_is_what_the_generators_are_whatever_was_drawn_before() -> None:
    rng = Rng()
    order = random.Random(7)
    draws: dict[str, Callable[[], object]] = {
        "numpy": np.random.rand,
        "numpy's normal": np.random.standard_normal,  # two at a time: the second moves no word
        "numpy's seed": lambda: np.random.seed(3),
        "python": random.random,
        "torch": lambda: torch.rand(1),
        "nothing": lambda: None,
    }
    for name in order.choices(list(draws), k=200):
        draws[name]()
        assert same(rng.snapshot(), Rng().snapshot()), name


def test_a_snapshot_at_every_boundary_is_cheap() -> None:
    rng = Rng()
    durations_s = []
    for _ in range(200):
        before_s = time.thread_time()
        rng.snapshot()
        durations_s.append(time.thread_time() - before_s)
    assert min(durations_s) < 100e-6  # about 25 on a quiet machine; asking NumPy takes 60 more


FRESH = """
import random, sys
import numpy as np, torch, resilient

def draw():
    return [random.random(), np.random.rand(), np.random.standard_normal(), torch.rand(1).item()]

@resilient.train(sys.argv[1], every=10**6)
def main(run):
    state = {"w": torch.zeros(4)}
    run.track(state=state)
    for _ in run.steps(range(4), total=4):
        if run.step == 2 and sys.argv[2] == "first":
            run.save().wait(60)
            print(draw())
            raise SystemExit
        if run.step == 2:
            print(draw())
            raise SystemExit
        draw()  # leaves a spare normal number in the generator

def refuse(event, arguments):
    if event == "pickle.find_class":
        raise RuntimeError(f"{arguments} is unpickled")

random.seed(1), np.random.seed(2), torch.manual_seed(3)
if sys.argv[2] == "again":
    sys.addaudithook(refuse)
main()
"""


@pytest.mark.field_report("BR-196")
def test_a_fresh_process_draws_on_from_plain_values_and_unpickles_nothing(tmp_path: Path) -> None:
    said = [
        subprocess.run(
            [sys.executable, "-c", FRESH, str(tmp_path / "run"), life],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for life in ("first", "again")
    ]
    assert said[0] == said[1]
    assert len(said[0].split(",")) == 4
