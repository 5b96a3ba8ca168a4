"""G1 and G4: everything killed at random moments, with each step kept near: the newest complete state is never lost."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import resilient
from resilient.catalog.line import read_line
from resilient.store.open import open_store
from resilient.testing import check_run
from resilient.testing.invariants import Arrays
from tests.figures import Figures
from tests.lives import Life
from tests.run.tiered import newest_in_tiers, no_memory_left_behind

SIZE = 2
LONGEST_S = 4.0
MOVING, FROZEN = 50_000, 200_000


def train_until_killed(place: str, folder: str, stop_at: int) -> None:
    """Add one to a tensor in every step, which is kept near; save every seventh without waiting."""
    rank = os.environ["RANK"]
    os.environ["RESILIENT_NODE_DIR"] = str(Path(folder) / f"node-{rank}")
    # What does not change is not stored again: a save then has another form in the store than in the tier.
    tiers = ["memory"]

    @resilient.train(place, every=10**9, keep=resilient.Keep(last=2), tiers=tiers, tier_every=1)
    def main(run: resilient.Run) -> None:
        state = {"moving": torch.zeros(MOVING), "frozen": torch.arange(FROZEN)}
        run.track(state=state)
        assert (state["moving"] == run.step).all()
        assert (state["frozen"] == torch.arange(FROZEN)).all()
        with Path(folder, f"starts-{rank}").open("a") as file:
            file.write(f"{run.step}\n")
        for _ in run.steps(range(10**6), total=stop_at):
            if run.step and run.step % 7 == 0:
                run.save()
            run.fence()
            dist.barrier()
            state["moving"].add_(1)
            time.sleep(0.02)

    main()


def expected(step: int) -> Arrays:
    return {
        "state.moving": np.full(MOVING, step, np.float32),
        "state.frozen": np.arange(FROZEN, dtype=np.int64),
    }


@pytest.fixture(autouse=True)
def memory(tmp_path: Path) -> Iterator[None]:
    with no_memory_left_behind(tmp_path):
        yield


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_whatever_is_killed_whenever_the_newest_state_that_is_complete_in_the_tiers_is_continued(
    tmp_path: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    told = figures("killed-tiers", "All processes killed at a random moment, with each step kept in memory")
    rounds, lives = count(3, 100), count(3, 10)
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    while len(told) < rounds:
        folder = tmp_path / f"from-{len(told)}"
        folder.mkdir()
        for _ in range(lives):
            told.add(**_one_life(folder, rng, seed))
        newest = started(folder)[-1]
        last = Life(SIZE, folder / "last", train_until_killed, str(folder / "run"), str(folder), newest + 50)
        last.succeed()
        assert started(folder)[-1] >= told_newest(told)
        assert not check_run(open_store(folder / "run"), at_least=newest + 50, expected=expected)


def _one_life(folder: Path, rng: random.Random, seed: int) -> Mapping[str, float]:
    place = folder / "run"
    delay_s = rng.uniform(0.2, LONGEST_S)
    before = len(started(folder))
    newest = newest_known(place)
    life = Life(SIZE, folder / f"life-{time.monotonic_ns()}", train_until_killed, str(place), str(folder), 10**6)
    end = time.monotonic() + 60
    while len(started(folder)) == before:  # each life shows what it has started from
        assert life.alive, life.output()
        assert time.monotonic() < end, life.output()
        time.sleep(0.01)
    time.sleep(delay_s)
    assert life.alive, life.output()
    life.kill_with_writers()
    life.wait()
    starts = started(folder)
    assert starts[-1] >= newest, f"seed {seed}: step {newest} was complete in the tiers, and {starts[-1]} was continued"
    violations = check_run(open_store(place), at_least=None, expected=expected)
    assert not violations, f"seed {seed}, killed after {delay_s:.3f} s: {violations[:5]}\n{life.output()}"
    return {"killed_after_s": round(delay_s, 3), "from": starts[-1], "newest": newest_known(place)}


def started(folder: Path) -> list[int]:
    """Return what rank 0 has started from, life by life."""
    path = folder / "starts-0"
    return list(map(int, path.read_text().split())) if path.exists() else []


def told_newest(told: Figures) -> int:
    return int(list(told)[-1]["newest"])


def newest_known(place: Path) -> int:
    """Return the newest step that is committed, or complete in the tiers."""
    if not (place / "run.json").exists():
        return 0
    committed = max((commit.step for commit in read_line(open_store(place)).commits), default=0)
    return max(committed, newest_in_tiers(place, Path("/dev/shm"), SIZE))
