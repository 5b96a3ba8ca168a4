"""A save that is still in flight: what a load, another save and the end of the program do about it."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch

import resilient
from resilient.events import SaveSkipped
from resilient.format.digest import BytesLike
from resilient.store.memory import MemoryStore


class Slow(MemoryStore):
    """A store whose data takes its time; ``most`` is how many objects were on their way at once."""

    def __init__(self, name: str, write_s: float) -> None:
        super().__init__(name)
        self._write_s = write_s
        self._lock = threading.Lock()
        self._writing = 0
        self.most = 0

    def put(self, key: str, parts: Sequence[BytesLike]) -> None:
        if not key.startswith("data/"):
            super().put(key, parts)
            return
        with self._lock:
            self._writing += 1
            self.most = max(self.most, self._writing)
        time.sleep(self._write_s)
        super().put(key, parts)
        with self._lock:
            self._writing -= 1


@pytest.mark.field_report("BR-038", "BR-047")
@pytest.mark.parametrize("step", ["latest", 2])
def test_a_load_right_after_a_save_waits_for_it(step: int | Literal["latest"]) -> None:
    store = Slow(f"slow-{step}", 0.5)
    state = {"w": torch.ones(1000), "epoch": 1}
    resilient.save(store, 1, {"state": state}).wait(30)
    state.update(epoch=2)
    handle = resilient.save(store, 2, {"state": state})
    state["w"].add_(1)  # type: ignore[attr-defined]  # a tensor
    state["epoch"] = 3
    assert not handle.committed.done()
    assert resilient.load(store, {"state": state}, step).step == 2
    assert handle.committed.done()
    assert torch.equal(state["w"], torch.ones(1000))  # type: ignore[arg-type]
    assert state["epoch"] == 2


@pytest.mark.field_report("BR-042")
def test_saves_that_are_due_while_one_is_in_flight_are_counted_and_those_that_are_asked_for_are_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "resilient")
    store, steps, asked = Slow("slow", 0.1), 20, {7, 12}
    skipped: list[int] = []

    @resilient.train(store, every=1, keep=resilient.Keep(last=steps))
    def main(run: resilient.Run) -> None:
        run._bus.subscribe(lambda event: skipped.append(event.step) if isinstance(event, SaveSkipped) else None)
        state = {"w": torch.zeros(1000)}
        run.track(state=state)
        for _ in run.steps(range(steps), total=steps):
            if run.step in asked:
                with run.section("evaluation"):
                    run.save("the best so far")
            state["w"].add_(1)

    main()
    found = resilient.checkpoints(store)
    saved = {each.step for each in found}
    assert saved >= {*asked, steps}
    assert saved | set(skipped) == {*range(1, steps + 1)}
    assert f"({len(skipped)} saves skipped)" in caplog.messages[-1]
    assert store.most == 1, "two saves were written at once"
    assert all(bool((each.tensor("w") == each.step).all()) for each in found)


PROGRAM = """
import sys, torch, resilient

@resilient.train(sys.argv[1], every=10**6, max_bandwidth="3MB/s", compress="off")
def main(run):
    state = {"w": torch.rand(1_000_000)}
    run.track(state=state)
    for _ in run.steps(range(3), total=3):
        if run.step == 2:
            handle = run.save()
            print("committed" if handle.committed.done() else "in flight", flush=True)
            match sys.argv[2]:
                case "exception": raise RuntimeError("a bug")
                case "exit": sys.exit()
        state["w"].add_(1)

main()
"""


@pytest.mark.field_report("BR-045", "BR-177")
@pytest.mark.parametrize(("ending", "code", "saved"), [("end", 0, [3, 2]), ("exception", 1, [2]), ("exit", 0, [2])])
def test_a_program_that_ends_with_a_save_in_flight_ends_when_it_is_committed(
    tmp_path: Path, ending: str, code: int, saved: list[int]
) -> None:
    place = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(place), ending], capture_output=True, text=True, timeout=120, check=False
    )
    assert [found.step for found in resilient.checkpoints(place)] == saved, done.stderr
    assert (done.returncode, done.stdout) == (code, "in flight\n"), done.stderr
    assert f"the newest committed step is {saved[0]}" in done.stderr
