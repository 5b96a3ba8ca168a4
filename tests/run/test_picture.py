"""What a step is spent on is what it is spent on: the share of the exchange, a slow rank, a slow link."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import profiler as of_torch
from torch.profiler import ProfilerActivity, profile, schedule

import resilient
from resilient import events
from resilient.clock import SYSTEM_CLOCK
from resilient.events import Bus, Event, SaveFenced, SaveStarted, StepPicture, Tiered
from resilient.run import picture_sampling
from resilient.run.picture import Picture
from resilient.run.picture_profile import Profile
from resilient.run.picture_sampling import Looks
from tests.elastic.namespaces import Network
from tests.ranks import Ranks

PROGRAM = Path(__file__).with_name("pictured.py")
WHY_NOT = Network.why_not()
PORT = 29511
POINTS = 0.05
TRIES = 2
CALM_TRIES = 4

# --- the share of the exchange, over a link that is slow for real -----------------------------------------------------


def trained(folder: Path, cases: list[tuple[str, float]], rate: str) -> list[dict[str, Any]]:
    """Train on two nodes whose links carry no more than ``rate``; return what was shown, and what was true."""
    with Network(2) as network:
        processes = []
        for rank in range(2):
            network.throttle(rank, rate)
            environ = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": network.addresses[0],
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            command = network.on(rank, [sys.executable, str(PROGRAM), str(folder), json.dumps(cases), str(TRIES)])
            processes.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
        try:
            said = [process.communicate(timeout=200)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0, 0], said
    return [json.loads(line.removeprefix("SHOWN ")) for text in said for line in text.splitlines() if "SHOWN" in line]


@pytest.mark.proof
@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
def test_the_share_of_the_exchange_is_shown_within_five_points_and_a_throttled_link_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [("by hand", 0.5), ("by hand", 0.2), ("DDP", 0.5), ("DDP", 0.2)]
    found = trained(tmp_path, cases, "120mbit")
    assert len(found) == 2 * len(cases)
    for each in found:
        print(each)
        (shown,), (steps,) = each["shown"], each["steps"]
        assert steps >= 3
        assert shown == pytest.approx(each["true"], abs=POINTS), "what the program's own clock says"
    if not all(each["calm"] for each in found):
        pytest.skip(f"the machine was too busy, {TRIES} times, to have an exchange of the share that is wanted")
    for each in found:
        assert each["shown"] == pytest.approx([each["wanted"]], abs=2 * POINTS), "calm is within 5 points of it"
    for how in ("by hand", "DDP"):
        (sentence,) = next(each["sentences"] for each in found if each["sentences"] and shape(each) == (how, 0.5))
        assert "eth0 of" in sentence
        assert "on a link of 10 Gbit/s: look at the switch, the cable, limits (tc)" in sentence
        (sentence,) = next(each["sentences"] for each in found if each["sentences"] and shape(each) == (how, 0.2))
        assert "computing is the limit" in sentence


def shape(found: dict[str, Any]) -> tuple[str, float]:
    return found["how"], found["wanted"]


# --- ranks that differ ------------------------------------------------------------------------------------------------


def train_unevenly(place: str) -> tuple[StepPicture, list[str], float, float]:
    """Train with a rank 1 that computes longer; return the picture, the sentences, and what the program measured.

    That is, of the steps that were looked at: the exchange, and the pause that stands for computing.
    """
    told: list[Event] = []
    exchanged: list[float] = []
    paused: list[float] = []
    torch.manual_seed(0)
    model = nn.Linear(8, 8)

    @resilient.train(place, every=10_000, picture_every=2, compare_every_s=600.0, observers=(told.append,))
    def main(run: resilient.Run) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.track(model=model, optimizer=optimizer)
        for _ in run.steps(range(24)):
            model(torch.ones(2, 8)).sum().backward()
            began_s = time.monotonic()
            time.sleep(0.02 + 0.12 * run.rank)
            paused_s = time.monotonic()
            dist.all_reduce(model.weight.grad)
            if torch.autograd._profiler_enabled():
                exchanged.append(time.monotonic() - paused_s)
                paused.append(paused_s - began_s)
            optimizer.step()
            optimizer.zero_grad()
        watch = run._watched._picture
        assert watch.tell()
        dist.barrier()
        if run.rank == 0:
            watch.judge()

    budget = picture_sampling.BUDGET
    try:
        picture_sampling.BUDGET = 1.0  # type: ignore[misc]  # half of few steps: what they show is the question here
        main()
    finally:
        picture_sampling.BUDGET = budget  # type: ignore[misc]
    (picture,) = (event for event in told if isinstance(event, StepPicture))
    sentences = [event.sentence for event in told if isinstance(event, events.Bottleneck)]
    return picture, sentences, median(exchanged[1:]), median(paused[1:])


def test_who_waits_shows_an_exchange_and_who_is_waited_for_is_named(ranks: Ranks, tmp_path: Path) -> None:
    for number in range(CALM_TRIES):
        found = ranks(2).run(train_unevenly, str(tmp_path / f"run{number}"))
        # On a busy machine the program's own clock also shows how long it waited for a processor.
        if all(abs(picture.exchange_s - exchanged_s) <= 0.02 for picture, _, exchanged_s, _ in found):
            break
    for picture, _, exchanged_s, paused_s in found:
        print(picture, exchanged_s, paused_s)
        assert picture.exchange_s == pytest.approx(exchanged_s, abs=0.02)
        assert picture.compute_s == pytest.approx(paused_s, abs=0.05)
        parts = picture.compute_s + picture.exchange_s + picture.data_s + picture.optimizer_s + picture.save_s
        assert parts == pytest.approx(picture.step_s, rel=1e-6)
    sentences = found[0][1]
    assert any("rank 1 needs" in sentence and "compute" in sentence for sentence in sentences), sentences


def train_profiling(place: str) -> tuple[int, int, bool]:
    """Train while the program profiles some steps itself; return how many operators it saw, and what we looked at."""
    told: list[Event] = []
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    seen = 0

    @resilient.train(place, every=10_000, picture_every=1, compare_every_s=600.0, observers=(told.append,))
    def main(run: resilient.Run) -> None:
        nonlocal seen
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.track(model=model, optimizer=optimizer)
        for turn in run.steps(range(40)):
            with profile(activities=[ProfilerActivity.CPU]) if 10 <= turn < 14 else _nothing() as own:
                model(torch.ones(2, 8)).sum().backward()
                dist.all_reduce(model.weight.grad)
            if own is not None:
                seen += sum("all_reduce" in event.name for event in own.events() or [])
            optimizer.step()
            optimizer.zero_grad()

    main()
    looked = sum(event.steps for event in told if isinstance(event, StepPicture))
    return seen, looked, torch.autograd._profiler_enabled()


class _nothing:  # noqa: N801 -- like contextlib's
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def test_a_program_may_profile_itself_in_the_very_step_that_is_looked_at(ranks: Ranks, tmp_path: Path) -> None:
    for seen, looked, still in ranks(2).run(train_profiling, str(tmp_path / "run")):
        assert seen >= 4, "each of its steps has its collective"
        assert looked > 0
        assert not still


def test_a_scheduled_profiler_of_the_program_keeps_ours_away() -> None:
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=1)) as own:
        for _ in range(3):
            assert Profile.begin() is None
            own.step()
    looked = Profile.begin()
    assert looked is not None
    with of_torch.profile(use_kineto=True) as theirs:  # ours makes way, or this would raise
        torch.ones(2).sum()
    assert looked.look() is None
    assert any(event.name == "aten::sum" for event in theirs.function_events or [])


# --- one rank, with a clock in hand -----------------------------------------------------------------------------------


class HandClock:
    def __init__(self) -> None:
        self.s = 100.0

    def monotonic(self) -> float:
        return self.s

    def __getattr__(self, name: str) -> Any:
        return getattr(SYSTEM_CLOCK, name)


def test_the_parts_of_a_step_come_from_turns_optimizers_and_saves() -> None:
    bus, clock = Bus(), HandClock()
    picture = Picture(None, rank=3, bus=bus, clock=clock, alone=True)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    picture.follow({"optimizer": optimizer})

    def closure() -> float:  # what step() calls takes its time
        clock.s += 0.5
        return 0.0

    for turn in range(25):
        picture.begin(0.25, turn)
        clock.s += 1.0
        optimizer.step(closure)
        if turn % 10 == 9:
            bus.emit(SaveStarted(step=turn, reason="interval", nbytes=1, stall_s=4.0))
            bus.emit(SaveFenced(step=turn, waited_s=1.0))
            clock.s += 5.0
            bus.emit(Tiered(step=turn, nbytes=1, cpu_s=0, duration_s=1, stall_s=4.0, tiers=()))  # the same stall
        picture.end()
    told = picture.take()
    assert told is not None
    assert (told.rank, told.steps, told.step) == (3, 20, 24)
    assert told.data_s == 0.25
    assert told.optimizer_s == pytest.approx(0.5)
    assert told.save_s == pytest.approx(2 * 5.0 / 20), "two of twenty turns had a save: its mean, or it would not show"
    assert told.step_s == pytest.approx(1.75 + 0.5)
    assert told.compute_s == pytest.approx(1.0)
    assert picture.take() is None, "nothing new"
    picture.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_turn_that_is_left_is_no_turn_and_its_profiler_ends() -> None:
    picture = Picture(Looks("t", every=1), rank=0, bus=Bus(), clock=SYSTEM_CLOCK)
    for turn in range(11):
        picture.begin(0.0, turn)
        if turn < 10:
            assert not torch.autograd._profiler_enabled(), "the first ones show how long a step takes"
            picture.end()
    assert torch.autograd._profiler_enabled()
    picture.close()
    assert not torch.autograd._profiler_enabled()
    assert picture.take(least=1) is None


def test_a_profiler_that_torch_has_changed_does_not_end_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Event] = []
    bus = Bus()
    bus.subscribe(told.append)
    picture = Picture(Looks("t", every=1), rank=0, bus=bus, clock=SYSTEM_CLOCK)
    monkeypatch.delattr(of_torch.KinetoStepTracker, "_step_dict")
    for turn in range(30):
        picture.begin(0.0, turn)
        picture.end()
    (notice,) = told
    assert isinstance(notice, events.Notice)
    assert "exchanges are not looked at any more" in notice.message
    assert picture.take() is None, "who does not know the exchange does not call it computing"
    picture.close()


def test_a_rank_alone_has_a_picture_and_is_not_profiled(tmp_path: Path) -> None:
    told: list[Event] = []

    @resilient.train(tmp_path, observers=(told.append,), sample_machine_s=0.05)
    def main(run: resilient.Run) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        run.track(model=model, optimizer=optimizer)
        for _ in run.steps(range(25)):
            assert not torch.autograd._profiler_enabled()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            time.sleep(0.01)

    main()
    (picture,) = (event for event in told if isinstance(event, StepPicture))
    assert (picture.steps, picture.exchange_s) == (20, 0.0)
    assert 0.01 < picture.compute_s <= picture.step_s
    (sentence,) = (event.sentence for event in told if isinstance(event, events.Bottleneck))
    assert "compute" in sentence
    (sampled,) = (event for event in told if isinstance(event, events.MachineSampled))
    assert {"cpu", "loopback_Bps"} <= {name for name, _ in sampled.values}
