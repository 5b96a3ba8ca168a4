"""A large state on a real S3 server: all ranks are killed in mid-upload, and the save before is what comes back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import resilient
from tests.crash.stalling import Stall, StallingStore
from tests.figures import Figures
from tests.lives import Life

MIB = 1 << 20
TENSORS = 8


def weights(nbytes: int, value: float) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((nbytes // TENSORS // 4,), value + number) for number in range(TENSORS)}


def train(url: str, nbytes: int, folder: str, plan: Stall | None, total: int) -> None:
    """Add one in each step and save each step; report where this life started and what it committed."""
    rank = int(os.environ["RANK"])
    store = StallingStore(resilient_store(url), plan if rank == 1 else None)

    @resilient.train(store, every=10**6, compress="off")
    def main(run: resilient.Run) -> None:
        state = weights(nbytes, 0.0)
        run.track(weights=state)
        if rank == 0:
            Path(folder, "started").write_text(str(run.step))
        assert all(bool((tensor == number + run.step).all()) for number, tensor in enumerate(state.values()))
        for _ in run.steps(range(total), total=total):
            if run.step > 0:
                run.save().wait(600)
            for tensor in state.values():
                tensor.add_(1)

    main()


def resilient_store(url: str) -> resilient.Store:
    from resilient.store.open import open_store

    return open_store(url)


@pytest.mark.proof
@pytest.mark.s3
@pytest.mark.timeout(1800)
def test_a_large_state_killed_in_mid_upload_comes_back_as_it_was_saved_before(
    s3_url: str, tmp_path: Path, count: Callable[[int, int], int], figures: Callable[[str, str], Figures]
) -> None:
    rounds = figures("large-state", "A large state on S3, killed in mid-upload")
    if len(rounds):
        return  # proven before
    nbytes = count(16, 2048) * MIB
    signal = tmp_path / "stalled"
    started_s = time.monotonic()
    # In the second save: a rank's half of the large state, and its random state, are more than one object holds.
    plan = Stall(moment="after data", number=count(2, 3), signal=signal)
    life = Life(2, tmp_path / "first", train, s3_url, nbytes, str(tmp_path), plan, 5)
    while not signal.exists():
        assert life.alive, life.output()
        assert time.monotonic() - started_s < 900
        time.sleep(0.05)
    life.kill()
    life.wait()
    Life(2, tmp_path / "second", train, s3_url, nbytes, str(tmp_path), None, 3).succeed(900)
    assert (tmp_path / "started").read_text() == "1", "the second life starts from the save that was complete"
    (newest, *_) = resilient.checkpoints(s3_url)
    assert newest.step == 3
    assert nbytes <= newest.nbytes < nbytes + MIB  # and the random state of both ranks
    assert newest.verify().ok
    assert torch.equal(newest.tensor("w5"), weights(nbytes, 3.0)["w5"])
    rounds.add(state_mib=nbytes // MIB, resumed_at_step=1, seconds=round(time.monotonic() - started_s))
