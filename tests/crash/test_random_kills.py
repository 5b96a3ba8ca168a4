"""G1 and G11: everything killed at random moments, again and again, while saves overlap and retention deletes."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch

import resilient
from resilient.catalog.contents import read_manifest
from resilient.catalog.line import read_line
from resilient.catalog.prune import prune
from resilient.clock import SYSTEM_CLOCK
from resilient.format import layout
from resilient.store.open import open_store
from resilient.testing import check_run
from resilient.testing.invariants import Arrays
from tests.figures import Figures
from tests.lives import Life
from tests.s3_server import S3Server

SIZE = 2
LIVES = 10  # in one place, one after another
LONGEST_S = 5.0
MOVING, FROZEN = 50_000, 200_000


def train_until_killed(url: str, reports: str, stop_at: int) -> None:
    """Add one to a tensor in every step, save every second step without waiting, report what was committed."""
    rank = os.environ["RANK"]

    def report(done: Future[int]) -> None:
        if done.exception() is None:
            with Path(f"{reports}-{rank}").open("a") as file:
                file.write(f"{done.result()}\n")

    @resilient.train(url, every=10**9, keep=resilient.Keep(last=2))
    def main(run: resilient.Run) -> None:
        state = {"moving": torch.zeros(MOVING), "frozen": torch.arange(FROZEN)}
        run.track(state=state)
        assert (state["moving"] == run.step).all()
        for _ in run.steps(range(10**6), total=stop_at):
            if run.step and run.step % 2 == 0:
                run.save().committed.add_done_callback(report)
            run.fence()
            state["moving"].add_(1)
            time.sleep(0.005)

    main()


def expected(step: int) -> Arrays:
    return {
        "state.moving": np.full(MOVING, step, np.float32),
        "state.frozen": np.arange(FROZEN, dtype=np.int64),
    }


def newest_reported(folder: Path) -> int:
    return max((int(line) for file in folder.glob("reports-*") for line in file.read_text().split()), default=0)


@pytest.mark.s3
@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_whatever_is_killed_whenever_a_newer_or_the_reported_step_is_restored(
    s3_server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: Callable[[int, int], int],
    figures: Callable[[str, str], Figures],
) -> None:
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    told = figures("random-kills", "All processes killed at a random moment, with overlapping saves and retention")
    rounds, lives = count(4, 200), count(2, LIVES)
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    while len(told) < rounds:
        on_s3 = bool(len(told) // lives % 2)
        folder = tmp_path / f"from-{len(told)}"
        url = s3_server.fresh_url() if on_s3 else str(folder / "run")
        for _ in range(lives):
            told.add(store="s3" if on_s3 else "local", **_one_life(url, folder, rng, seed))
        _collect(url, folder)


def _one_life(url: str, folder: Path, rng: random.Random, seed: int) -> Mapping[str, float]:
    delay_s = rng.uniform(0.2, LONGEST_S)
    life = Life(SIZE, folder / f"life-{time.monotonic_ns()}", train_until_killed, url, str(folder / "reports"), 10**6)
    time.sleep(delay_s)
    assert life.alive, life.output()
    life.kill_with_writers()
    life.wait()
    reported = newest_reported(folder)
    store = open_store(url)
    violations = check_run(store, at_least=reported or None, expected=expected)
    assert not violations, f"seed {seed}, killed after {delay_s:.3f} s: {violations[:5]}\n{life.output()}"
    newest = max((commit.step for commit in read_line(store).commits), default=0) if reported else 0
    store.close()
    return {"killed_after_s": round(delay_s, 3), "reported": reported, "newest": newest}


def _collect(url: str, folder: Path) -> None:
    """A life that ends well, and retention, leave nothing but what is listed."""
    newest = newest_reported(folder)
    Life(SIZE, folder / "last", train_until_killed, url, str(folder / "reports"), newest + 4).succeed()
    store = open_store(url)
    for _ in range(2):  # what is given up in the first call goes in the second
        line = read_line(store)
        prune(store, line, {line.commits[0].step}, clock=SYSTEM_CLOCK, grace_s=0.01)
    assert not check_run(store, at_least=newest + 4, expected=expected)
    (commit,) = read_line(store).commits
    assert commit.step == newest + 4
    needed = {each.key for each in read_manifest(store, commit).objects}
    assert set(store.list(layout.DATA)) == needed, "what dead lives left was not collected"
    store.close()
