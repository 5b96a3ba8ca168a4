"""G7, G8, G9: a run on FSDP2 that loses a rank again and again, on changing numbers of ranks, ends as if it had not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.crash.survivor import GLOBAL_BATCH, LENGTH
from tests.figures import Figures

PROGRAM = Path(__file__).with_name("survivor.py")


def launch(size: int, store: str, folder: Path, life: str, total: int, pause_s: float) -> subprocess.Popen[bytes]:
    log = (folder / f"log-{life}").open("wb")
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}", "--standalone", str(PROGRAM)]
    arguments = [store, str(folder), life, str(total), str(pause_s)]
    return subprocess.Popen(
        command + arguments,
        stdout=log,
        stderr=log,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(torchrun: subprocess.Popen[bytes], folder: Path, life: str, timeout_s: float = 300) -> None:
    code = torchrun.wait(timeout_s)
    assert code == 0, f"exit {code}\n{(folder / f'log-{life}').read_text(errors='replace')[-6000:]}"


def samples(folder: Path, life: str) -> dict[int, list[int]]:
    """Return which samples each step of a life took, over all ranks."""
    steps: dict[int, list[int]] = {}
    for path in sorted(folder.glob(f"samples-{life}-*")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                step, *ids = map(int, line.split())
                steps.setdefault(step, []).extend(ids)
    return steps


def kill_one_rank(torchrun: subprocess.Popen[bytes], folder: Path, life: str, size: int, rng: random.Random) -> int:
    """SIGKILL a random rank at a random moment after the first step; return which."""
    victim = rng.randrange(size)
    end = time.monotonic() + 90
    while not samples(folder, life):
        assert torchrun.poll() is None, (folder / f"log-{life}").read_text(errors="replace")[-6000:]
        assert time.monotonic() < end, "no step within 90 s"
        time.sleep(0.05)
    time.sleep(rng.uniform(0, 1.5))
    os.kill(int((folder / f"pid-{life}-{victim}").read_text()), signal.SIGKILL)
    assert torchrun.wait(60) != 0
    return victim


def survive(store: str, folder: Path, kills: int, figures: Figures, sizes: Sequence[int] = (1, 2, 3, 4)) -> None:
    if len(figures) == kills:
        return  # proven before: the kills of one run count only together
    total, pause_s = 40 + 50 * kills, 0.03
    rounds: list[dict[str, int]] = []
    whole = folder / "whole"
    whole.mkdir()
    finish(launch(4, str(folder / "uninterrupted"), whole, "0", total, 0.0), whole, "0")
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    size = 4
    for number in range(kills):
        life = str(number)
        torchrun = launch(size, store, folder, life, total, pause_s)
        victim = kill_one_rank(torchrun, folder, life, size, rng)
        done = max(samples(folder, life)) + 1
        rounds.append({"life": number, "ranks": size, "killed_rank": victim, "steps_done": done})
        size = rng.choice(sizes)
    finish(launch(size, store, folder, str(kills), total, 0.0), folder, str(kills))
    check_samples(whole, folder, kills, total)
    check_state(whole, folder, kills, exact=set(sizes) == {4})
    for each in rounds:
        figures.add(**each)


def check_samples(whole: Path, folder: Path, kills: int, total: int) -> None:
    """Every step took the samples of the uninterrupted run, and every epoch each sample exactly once."""
    wanted = samples(whole, "0")
    used: dict[int, list[int]] = {}
    for life in range(kills + 1):
        used |= samples(folder, str(life))  # a later life redoes what was lost
    assert sorted(used) == list(range(total))
    assert {step: sorted(ids) for step, ids in used.items()} == {step: sorted(ids) for step, ids in wanted.items()}
    per_epoch = -(-LENGTH // GLOBAL_BATCH)
    for epoch in range(total // per_epoch):
        ids = Counter(i for step in range(epoch * per_epoch, (epoch + 1) * per_epoch) for i in used[step])
        assert ids == Counter(range(LENGTH))


def check_state(whole: Path, folder: Path, kills: int, *, exact: bool) -> None:
    wanted = np.load(whole / "final-0.npz")
    got = np.load(folder / f"final-{kills}.npz")
    assert sorted(wanted) == sorted(got)
    for name in wanted:
        if exact:
            assert np.array_equal(wanted[name], got[name]), name
        else:
            np.testing.assert_allclose(got[name], wanted[name], rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_a_killed_run_ends_as_if_it_had_not_been_on_any_number_of_ranks(
    tmp_path: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    rounds = figures("survival-local", "FSDP2 on 4 ranks, one rank killed, restarted on 1 to 4 ranks, local disk")
    survive(str(tmp_path / "run"), tmp_path, count(2, 20), rounds)


@pytest.mark.proof
@pytest.mark.s3
@pytest.mark.timeout(1800)
def test_a_killed_run_on_s3_ends_as_if_it_had_not_been(
    s3_url: str, tmp_path: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    rounds = figures("survival-s3", "The same on a real S3 server with credentials")
    survive(s3_url, tmp_path, count(1, 20), rounds)


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_a_killed_run_on_the_same_number_of_ranks_ends_bit_for_bit_as_if_it_had_not_been(
    tmp_path: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    rounds = figures("survival-bitwise", "FSDP2 on 4 ranks, one rank killed, restarted on 4 ranks: equal bit for bit")
    survive(str(tmp_path / "run"), tmp_path, count(1, 5), rounds, sizes=(4,))
