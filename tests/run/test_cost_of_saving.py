"""What a save takes of the trainer: nothing that stays, and little of its processor time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

import resilient
from resilient.events import SavePersisted
from resilient.writer.process import ProcessWriter
from tests.lives import Life

WARM = 5


def taken_by(pid: int) -> dict[str, int]:
    """Return the resident memory of a process, its shared memory included, its open files and its threads."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "memory": int(lines["VmRSS"].split()[0]),
        "files": len(os.listdir(f"/proc/{pid}/fd")),  # noqa: PTH208 -- the shortest way
        "threads": int(lines["Threads"]),
    }


def save_again_and_again(place: str, note: str, saves: int) -> None:
    """Save after every step; write down what trainer and writer have taken after each save."""
    state = {str(number): torch.rand(1 << 16) for number in range(32)}
    seen: list[dict[str, dict[str, int]]] = []

    @resilient.train(place, every=10**6)
    def main(run: resilient.Run) -> None:
        run.track(state=state)
        writer = cast("ProcessWriter", run._saver._writers._link).pid
        for _ in run.steps(range(saves + 1), total=saves + 1):
            run.save().wait(60)
            seen.append({"trainer": taken_by(os.getpid()), "writer": taken_by(writer)})
            for tensor in state.values():
                tensor.add_(1)

    main()
    Path(note).write_text(json.dumps(seen))


@pytest.mark.field_report("BR-160")
def test_a_run_takes_as_much_after_a_hundred_saves_as_after_five(
    tmp_path: Path, count: Callable[[int, int], int]
) -> None:
    note = tmp_path / "note"
    Life(1, tmp_path / "life", save_again_and_again, str(tmp_path / "run"), str(note), count(100, 400)).succeed(200)
    seen = json.loads(note.read_text())
    for process in ("trainer", "writer"):
        taken = [each[process] for each in seen]
        assert taken[-1]["memory"] <= 1.1 * taken[WARM - 1]["memory"]
        for what in ("files", "threads"):  # some come and go, and a pool fills up as it is used
            first, second = taken[: len(taken) // 2], taken[len(taken) // 2 :]
            assert max(each[what] for each in second) <= max(each[what] for each in first), what


TENSORS = 10_000


def save_many_tensors(place: str, note: str) -> None:
    """Write down, for each save, the processor time that the trainer's other threads took, and the writer."""
    state = {str(number): torch.zeros(64) for number in range(TENSORS)}
    written: dict[int, float] = {}
    beside: dict[int, float] = {}

    def follow(event: object) -> None:
        if isinstance(event, SavePersisted):
            written[event.step] = event.cpu_s

    @resilient.train(place, every=10**6)
    def main(run: resilient.Run) -> None:
        run._bus.subscribe(follow)
        run.track(state=state)
        for _ in run.steps(range(6), total=6):
            before_s = time.process_time() - time.thread_time()
            handle = run.save()
            run.fence()
            handle.wait(60)
            beside[run.step] = time.process_time() - time.thread_time() - before_s
            for tensor in state.values():
                tensor.add_(1)

    main()
    Path(note).write_text(json.dumps([(beside[step], written[step]) for step in beside]))


@pytest.mark.field_report("BR-211")
def test_a_save_of_many_tensors_takes_little_of_the_interpreter_that_trains(tmp_path: Path) -> None:
    note = tmp_path / "note"
    Life(1, tmp_path / "life", save_many_tensors, str(tmp_path / "run"), str(note)).succeed(100)
    costs = json.loads(note.read_text())
    beside_s = min(beside for beside, _ in costs[2:])
    assert beside_s < 1e-6 * TENSORS
    assert beside_s < 0.5 * min(written for _, written in costs[2:]), "the work is the writer's"
