"""G1, whole or not at all: all ranks killed in every phase of a save, again and again in one run."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import resilient
from resilient.cli.main import main as cli
from resilient.store.open import open_store
from tests.crash.stalling import MOMENTS, Stall, StallingStore, stall
from tests.figures import Figures
from tests.lives import Life

SIZE = 2
PHASES = ("in capture", *MOMENTS, "after all")


class Captured:
    """An item whose capture can be made to stop."""

    def __init__(self, plan: Stall | None) -> None:
        self._plan = plan
        self._seen = -1  # `track` captures once to see that everything can be saved

    def state_dict(self) -> dict[str, int]:
        self._seen += 1
        if self._plan is not None and self._seen == self._plan.number:
            stall(self._plan.signal)
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {}


def train_until_killed(url: str, reports: str, plan: Stall | None, rank_to_stop: int) -> None:
    """Add one to every parameter in every step and save it, reporting each commit in a file that outlives us."""
    rank = int(os.environ["RANK"])
    mine = plan if rank == rank_to_stop else None
    in_store = mine is not None and mine.moment in MOMENTS

    @resilient.train(
        StallingStore(open_store(url), mine if in_store else None), every=10**6, keep=resilient.Keep(last=3)
    )
    def main(run: resilient.Run) -> None:
        weights = {"w": torch.zeros(1000, dtype=torch.float64), "big": torch.zeros(300_000)}
        stopper = Captured(mine if mine is not None and mine.moment == "in capture" else None)
        run.track(weights=weights, stopper=stopper)
        for _ in run.steps(range(10**6), total=10**6):
            if run.step > 0:
                run.save().wait(60)
                with Path(reports).open("a") as file:
                    file.write(f"{run.step}\n")
                if mine is not None and mine.moment == "after all":
                    stall(mine.signal)
            for tensor in weights.values():
                tensor.add_(1)

    main()


def newest_reported(reports: Path) -> int:
    return max((int(line) for line in reports.read_text().split()), default=0) if reports.exists() else 0


@pytest.mark.proof
@pytest.mark.timeout(1500)
def test_whole_or_not_at_all_whenever_all_ranks_are_killed(
    tmp_path: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    rounds = figures(
        "killed-saves", "All ranks killed in each phase of a save: the newest reported step or a later one is restored"
    )
    run = tmp_path / "run"
    reports = tmp_path / "reports"
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for number in range(len(rounds), count(len(PHASES), 60)):
        phase = PHASES[number % len(PHASES)]
        plan = Stall(moment=phase, number=rng.randint(1, 3), signal=tmp_path / f"stalled-{number}")
        # Only the committer writes manifest and COMMIT; the others take over seconds later.
        rank = 0 if "manifest" in phase or "commit" in phase else rng.randrange(SIZE)
        life = Life(SIZE, tmp_path / f"life-{number}", train_until_killed, str(run), str(reports), plan, rank)
        _await_stall(life, plan)
        life.kill()
        life.wait()
        restored = _check(run, newest_reported(reports))
        rounds.add(phase=phase, killed_in_save=plan.number, reported=newest_reported(reports), restored=restored)


def _await_stall(life: Life, plan: Stall) -> None:
    end = time.monotonic() + 90
    while not plan.signal.exists():
        if not life.alive or time.monotonic() > end:
            life.kill()
            pytest.fail(f"never came to {plan.moment!r}\n{life.output()}")
        time.sleep(0.01)


def _check(run: Path, reported: int) -> int:
    """Everything that is listed verifies and restores to what training had at that step; nothing reported is lost."""
    if reported == 0 and not (run / "run.json").exists():
        return 0
    listed = json.loads(CliRunner().invoke(cli, ["ls", str(run), "--json"]).stdout)
    steps: list[int] = [each["step"] for each in listed.get("checkpoints", [])]
    assert max(steps, default=0) >= reported, f"step {reported} was reported committed; listed are {steps}"
    if not steps:
        return 0
    verified = CliRunner().invoke(cli, ["verify", str(run), "--deep", "--json"])
    assert verified.exit_code == 0, verified.output
    for step in steps:
        weights = {"w": torch.full((1000,), -1.0, dtype=torch.float64), "big": torch.full((300_000,), -1.0)}
        resilient.load(run, {"weights": weights}, step=step)
        assert all(bool((tensor == step).all()) for tensor in weights.values()), step
    return max(steps)
