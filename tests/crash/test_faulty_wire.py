"""Saves to a real S3 server over a wire that loses, cuts, refuses or damages what passes it, or is gone for a while."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import resilient
from resilient.catalog.line import read_line
from resilient.store.open import open_store
from resilient.testing.proxy import FaultProxy, HttpFault, HttpRule
from tests.figures import Figures
from tests.lives import Life
from tests.s3_server import S3Server

pytestmark = pytest.mark.s3

SEED = 20261201
SHARE = 0.05
OBJECTS = "/*/*/*"
DATA = "/*/data/*"
FAULTS = [
    HttpFault.RESET,
    HttpFault.RESET_IN_BODY,
    HttpFault.SLOW_DOWN,
    HttpFault.SERVER_ERROR,
    HttpFault.LOST_RESPONSE,
    HttpFault.TRUNCATED,
    HttpFault.FLIPPED_UPLOAD,
    HttpFault.FLIPPED_DOWNLOAD,
]


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.endpoint, seed=SEED) as proxy:
        yield proxy


def state_of(step: int, numel: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(SEED + step)
    return {name: torch.randint(-(2**63), 2**63 - 1, (numel,), generator=draw) for name in ("a", "b")}


def options(server: S3Server, proxy: FaultProxy) -> dict[str, Any]:
    return {**server.options(), "endpoint_url": proxy.url}


@pytest.mark.proof
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_saves_over_a_faulty_wire_are_committed_and_bit_equal(
    fault: HttpFault,
    proxy: FaultProxy,
    s3_server: S3Server,
    count: Callable[[int, int], int],
    figures: Callable[[str, str], Figures],
) -> None:
    told = figures(f"faulty-wire-{fault}", f"Saves to S3 while 5 % of the requests meet this: {fault}")
    if len(told):
        return
    saves, numel = count(3, 100), count(1 << 14, 3 << 19)  # 2 tensors of 8 bytes: 256 KiB, 24 MiB
    url, through = s3_server.fresh_url(), options(s3_server, proxy)
    # Of objects: what a listing says is only proposed, and has no digest.
    proxy.use(HttpRule(fault=fault, path=OBJECTS, share=SHARE), HttpRule(fault=fault, path=DATA, every=count(2, 10**9)))
    for step in range(1, saves + 1):
        resilient.save(url, step, {"state": state_of(step, numel)}, storage_options=through).wait(240)
    injected = sum(proxy.injected.values())
    found = resilient.checkpoints(url, storage_options=through)
    assert [each.step for each in found] == list(range(saves, 0, -1))
    for each in found:
        for name, tensor in state_of(each.step, numel).items():
            assert torch.equal(each.tensor(f"state.{name}"), tensor), (each.step, SEED)
    wanted = saves * 2 * numel * 8
    duplicate = proxy.uploaded_nbytes(DATA) / wanted - 1
    assert injected
    if saves == 100:
        assert duplicate < 0.1, f"{duplicate:.1%} of the bytes were sent twice, seed {SEED}"
    told.add(
        saves=saves,
        committed=saves,
        bit_equal=saves,
        requests=len(proxy.requests),
        befallen=sum(proxy.injected.values()),
        duplicate_percent=round(100 * duplicate, 2),
    )
    store = open_store(url, storage_options=s3_server.options())
    for key in tuple(store.list("")):
        store.delete(key)
    store.close()


def train_through(url: str, folder: str, settings: dict[str, Any], wait_s: float) -> None:
    """Save once, say so, go on with short steps; save again as soon as the store is away, and until it is back."""
    notes = Path(folder)

    @resilient.train(url, every=10**9, **settings)
    def main(run: resilient.Run) -> None:
        w = torch.zeros(200_000)
        run.track(state={"w": w})
        slowest_s, ended, handle = 0.0, time.monotonic(), None

        def until_it_is_back() -> Iterator[int]:
            while not (notes / "back").exists():
                yield 0

        for _ in run.steps(until_it_is_back()):
            now = time.monotonic()
            if run.step > 6:  # the fifth waited for its commit, on purpose
                slowest_s = max(slowest_s, now - ended)
            ended = now
            if run.step == 5:
                run.save().wait(60)
                (notes / "saved").touch()
            elif handle is None and (notes / "away").exists():
                handle = run.save()
            w.add_(1)
            time.sleep(0.02)
        assert handle is not None
        handle.wait(wait_s)
        (notes / "result").write_text(f"{slowest_s} {run.step} {handle.step}")

    main()


def wait_for(path: Path, life: Life, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not path.exists():
        assert life.alive, life.output()
        assert time.monotonic() < end, f"no {path.name} within {timeout_s:g} s\n{life.output()}"
        time.sleep(0.02)


@pytest.mark.proof
def test_training_does_not_wait_for_a_store_that_is_away_and_the_save_commits_after(
    proxy: FaultProxy,
    s3_server: S3Server,
    tmp_path: Path,
    count: Callable[[int, int], int],
    figures: Callable[[str, str], Figures],
) -> None:
    told = figures("outage", "A store that is away while training goes on")
    if len(told):
        return
    outage_s = float(count(8, 120))
    url = s3_server.fresh_url()
    settings = {"storage_options": options(s3_server, proxy)}
    life = Life(1, tmp_path / "life", train_through, url, str(tmp_path), settings, 120.0)
    wait_for(tmp_path / "saved", life)
    with proxy.outage():
        (tmp_path / "away").touch()
        time.sleep(outage_s)
    (tmp_path / "back").touch()
    life.succeed(timeout_s=180)
    slowest, steps, saved = (tmp_path / "result").read_text().split()
    assert float(slowest) < 1.0, f"a step took {slowest} s while the store was away\n{life.output()}"
    assert int(steps) > outage_s / 0.2, "training stood still"
    store = open_store(url, storage_options=s3_server.options())
    assert int(saved) in {commit.step for commit in read_line(store).commits}
    store.close()
    told.add(outage_s=outage_s, slowest_step_s=round(float(slowest), 3), steps_meanwhile=int(steps), committed=1)


def train_for_good(url: str, folder: str, settings: dict[str, Any]) -> None:
    @resilient.train(url, every=20, **settings)
    def main(run: resilient.Run) -> None:
        w = torch.zeros(1000)
        run.track(state={"w": w})
        for _ in run.steps(range(10**9)):
            if run.step == 20:
                run.save().wait(60)
                (Path(folder) / "saved").touch()
                while not (Path(folder) / "away").exists():
                    time.sleep(0.01)
            w.add_(1)
            time.sleep(0.01)

    main()


def test_a_store_that_stays_away_ends_the_run_loudly_within_the_budget(
    proxy: FaultProxy, s3_server: S3Server, tmp_path: Path
) -> None:
    url = s3_server.fresh_url()
    settings = {"storage_options": options(s3_server, proxy), "max_failed_saves": 2, "commit_timeout_s": 8.0}
    life = Life(1, tmp_path / "life", train_for_good, url, str(tmp_path), settings)
    wait_for(tmp_path / "saved", life)
    with proxy.outage():
        started = time.monotonic()
        (tmp_path / "away").touch()
        codes = life.wait(100)
    assert codes == [1], life.output()
    assert time.monotonic() - started < 60, "two saves of 8 s each were borne"
    assert "2 saves in a row failed" in life.output()
    assert "step is 20" in life.output()
    assert os.environ.get("AWS_ACCESS_KEY_ID") is None or "owner-secret" not in life.output()
