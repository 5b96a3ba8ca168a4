"""What the events of a rank add up to, and that all of it has a documented name."""

from __future__ import annotations

import signal
import time
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch

import resilient
from resilient import events
from resilient.engine.stage import Stager, Staging
from resilient.observe.measures import COMPUTE, DATA, EXCHANGE, SAVE, Measures
from resilient.observe.names import METRICS, Kind
from resilient.report.model import Part

DOCUMENTED = {metric.name: metric for metric in METRICS}


def one_of_each() -> list[events.Event]:
    """Return an event of every kind, with something in every field."""
    made: dict[str, Any] = {
        "int": 3,
        "int | None": 2,
        "float": 0.5,
        "float | None": 0.5,
        "str": "x",
        "str | None": "x",
        "bool": True,
        "tuple[int, ...]": (1,),
        "tuple[str, ...]": ("x",),
        "tuple[tuple[str, int], ...]": (("x", 1),),
        "tuple[tuple[str, str, int], ...]": (("x", "y", 1),),
        "tuple[tuple[str, tuple[float, ...]], ...]": (("x", (0.5,)),),
    }
    return [
        kind(**{each.name: made[str(each.type)] for each in fields(kind) if each.default is MISSING})
        for kind in vars(events).values()
        if isinstance(kind, type) and issubclass(kind, events.Event)
    ]


def test_one_life_in_numbers() -> None:
    measures = Measures()
    for event in (
        events.GenerationStarted(url="u", generation=4, world_size=8, resumed_step=100),
        events.StepsTaken(step=110, steps=10, turn_s=10.0, data_s=2.0, save_s=1.0),
        events.StepPicture(
            step=110,
            steps=3,
            step_s=1.0,
            compute_s=0.3,
            exchange_s=0.35,
            data_s=0.2,
            optimizer_s=0.05,
            save_s=0.1,
        ),
        events.SaveStarted(step=110, reason="interval", nbytes=9, stall_s=0.02),
        events.SaveFenced(step=110, waited_s=0.25),
        events.StepsTaken(step=120, steps=10, turn_s=10.0, data_s=2.0, save_s=1.0),
        events.SavePersisted(step=110, nbytes=9, sent=7, cpu_s=0.1, duration_s=3.0),
        events.SaveCommitted(step=110, nbytes=9, duration_s=4.0),
        events.SaveFailed(step=115, error="disk full"),
        events.SaveSkipped(step=118, why="busy"),
        events.HangFound(section="step", step=120, age_s=9.0, timeout_s=5.0, cause=1, cause_section="data", why="w"),
    ):
        measures(event)
    reading = measures.read()
    values = reading.values
    assert values["resilient_step", ()] == 120
    assert values["resilient_steps_total", ()] == 20
    # Ten turns of 1 s, and of the second of save stall in them what was outside of the turns.
    assert values["resilient_step_seconds", ()] == pytest.approx(1.0 + (1.0 - 0.25) / 10)
    assert (values["resilient_generation", ()], values["resilient_world_size", ()]) == (4, 8)
    assert [values["resilient_saves_total", (how,)] for how in ("committed", "failed", "skipped")] == [1, 1, 1]
    assert values["resilient_saved_step", ()] == 110
    assert values["resilient_save_bytes_total", ()] == 7
    assert values["resilient_save_fence_seconds_total", ()] == 0.25
    # Ten turns before there is a picture count as computing, the ten after it by halves, as the picture says.
    spent = {part: values["resilient_time_seconds_total", (part,)] for part in (COMPUTE, EXCHANGE, DATA, SAVE)}
    assert spent == {COMPUTE: 8.0 + 7.75 / 2, EXCHANGE: 7.75 / 2, DATA: 4.0, SAVE: 2.0}, "the fence is within turns"
    assert values["resilient_step_part_seconds", ("exchange",)] == 0.35
    assert {what: values["resilient_at_stake_steps", (what,)] for what in ("process", "node", "job")} == {
        "process": 10,
        "node": 10,
        "job": 10,
    }
    stall = reading.histograms["resilient_save_stall_seconds", ("store",)]
    assert (stall.total_s, sum(stall.counts), stall.counts[2]) == (0.02, 1, 1)  # above 10 ms, up to 50 ms
    assert (values["resilient_hangs_total", ()], values["resilient_hung", ()]) == (1, 1)
    measures(events.HangOver(section="step", step=120))
    assert measures.read().values["resilient_hung", ()] == 0
    assert reading.values["resilient_hung", ()] == 1  # what was read does not change any more


def test_a_wait_at_the_fence_that_comes_before_its_turn_is_taken_off_that_turn() -> None:
    measures = Measures()
    measures(events.SaveFenced(step=1, waited_s=3.0))
    measures(events.StepsTaken(step=1, steps=1, turn_s=1.0, data_s=0.5, save_s=3.0))  # the turn that waited goes on
    assert measures.read().values["resilient_time_seconds_total", (COMPUTE,)] == 0.0
    measures(events.StepsTaken(step=2, steps=1, turn_s=4.0, data_s=0.5, save_s=2.5))
    values = measures.read().values
    spent = {part: values["resilient_time_seconds_total", (part,)] for part in (COMPUTE, EXCHANGE, DATA, SAVE)}
    assert spent == {COMPUTE: 0.5 + 3.5 - 3.0, EXCHANGE: 0.0, DATA: 1.0, SAVE: 5.5}


def test_the_parts_of_time_sum_to_the_wall_clock_of_a_real_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, fence = Stager.stage, Staging.fence
    clock: list[float] = []

    def slow_stage(*args: Any, **kwargs: Any) -> Staging:
        time.sleep(0.15)
        return stage(*args, **kwargs)

    def slow_fence(staging: Staging) -> float:
        time.sleep(0.1)
        return 0.1 + fence(staging)

    monkeypatch.setattr(Stager, "stage", slow_stage)
    monkeypatch.setattr(Staging, "fence", slow_fence)
    measures = Measures()
    seen: list[events.Event] = []

    @resilient.train(tmp_path, every=4, journal_every_s=0.1, observers=(measures, seen.append))
    def main(run: resilient.Run) -> None:
        model = torch.nn.Linear(64, 64)  # what an optimizer changes may overlap: then a step waits at the fence
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for _ in run.steps(range(41)):
            clock.append(time.monotonic())
            time.sleep(0.02)
            model(torch.ones(64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        clock.append(time.monotonic())

    main()
    values = measures.read().values
    spent = {part: values["resilient_time_seconds_total", (part,)] for part in (COMPUTE, EXCHANGE, DATA, SAVE)}
    loop_s = clock[-1] - clock[0]  # what is prepared before the first turn is no part of the loop
    assert values["resilient_steps_total", ()] == 41
    stalls = [each.stall_s for each in seen if isinstance(each, events.SaveStarted) and each.reason == "interval"]
    waits = [each.waited_s for each in seen if isinstance(each, events.SaveFenced)]
    print(f"loop {loop_s:.3f} s, {spent}, stalls {sum(stalls):.3f} s, fences {sum(waits):.3f} s")
    assert sum(stalls) >= 0.15 * len(stalls) > 0.5
    assert sum(waits) >= 0.1 * len(waits) > 0.5
    # More than the wall clock is time that counts twice; less is what a save does besides its stall, such as to read
    # out the state: little, but for a busy machine. Waits at the fence are a quarter of this loop.
    assert 0.92 * loop_s < sum(spent.values()) < 1.01 * loop_s
    assert spent[SAVE] == pytest.approx(sum(stalls) + sum(waits), rel=0.01)


def test_the_share_is_that_of_the_last_look() -> None:
    measures = Measures()
    for delivered in (0.9, 0.97):
        measures(events.ShareLooked(promised=0.95, delivered=delivered))
    values = measures.read().values
    assert (values["resilient_ettr", ()], values["resilient_ettr_promised", ()]) == (0.97, 0.95)


def test_tiers_lower_what_is_at_stake() -> None:
    measures = Measures()
    measures(events.GenerationStarted(url="u", generation=1, world_size=8, resumed_step=None))
    measures(events.AtStake(process_step=95, process_source="memory", node_step=None, node_source="store"))
    measures(events.StepsTaken(step=100, steps=100, turn_s=1.0, data_s=0.0, save_s=0.0))
    found = measures.read().values
    assert {what: found["resilient_at_stake_steps", (what,)] for what in ("process", "node", "job")} == {
        "process": 5,
        "node": 100,
        "job": 100,
    }


def test_all_that_is_counted_has_a_documented_name() -> None:
    measures = Measures()
    for event in one_of_each():
        measures(event)
    reading = measures.read()
    found = {(name, len(labels)) for name, labels in [*reading.values, *reading.histograms]}
    assert found == {(metric.name, len(metric.labels)) for metric in METRICS}
    assert {name for name, _ in reading.histograms} == {
        name for name, metric in DOCUMENTED.items() if metric.kind is Kind.HISTOGRAM
    }


def test_the_parts_of_time_are_those_of_the_report() -> None:
    assert {COMPUTE, EXCHANGE, DATA, SAVE} <= set(Part)


def test_a_signal_handler_may_report_in_the_middle_of_anything() -> None:
    measures = Measures()
    asked = events.StopAsked(kind="stop", why="SIGUSR1", within_s=None)
    before = signal.signal(signal.SIGUSR1, lambda *_: measures(asked))
    try:
        with measures._lock:  # as if the signal came within an event
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert measures.read().values["resilient_stop_asked", ()] == 1
