"""A training of some ranks, one of which hangs somewhere, for processes that tests start.

``where``: step, exchange, save, restore, eval, data (the iterator of the trainer), loader (a worker process of it).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import resilient

HANG_AT = 40
"""Steps that are complete before it hangs."""

SETTINGS: dict[str, Any] = {"watch_every_s": 0.25, "hang_floor_s": 1.5, "hang_after_s": 15.0, "every": 4}


def hang() -> None:
    while True:
        time.sleep(1.0)


class Position:
    """Something with a state that hangs while it is saved or restored."""

    def __init__(self, run: resilient.Run, *, saving: bool, restoring: bool) -> None:
        self._run = run
        self._saving = saving
        self._restoring = restoring

    def state_dict(self) -> dict[str, int]:
        if self._saving and self._run.step >= HANG_AT:
            hang()
        return {"at": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self._restoring:
            hang()


class Rows(Dataset[torch.Tensor]):
    def __init__(self, hangs_at: int | None) -> None:
        self._hangs_at = hangs_at

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._hangs_at is not None and index >= self._hangs_at:
            hang()
        return torch.full((4,), float(index))


def batches(place: str, hangs: bool) -> Iterator[torch.Tensor]:
    for number in range(4000):
        if hangs and number == HANG_AT:
            hang()
        yield torch.full((4,), float(number))


def train(place: str, where: str, victim: int, total: int = 400) -> None:
    @resilient.train(place, **SETTINGS)
    def main(run: resilient.Run) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        mine = run.rank == victim and total > HANG_AT
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        position = Position(run, saving=mine and where == "save", restoring=mine and where == "restore")
        run.track(model=model, optimizer=optimizer, position=position)
        data: Any = batches(place, mine and where == "data")
        if where == "loader":
            data = DataLoader(
                Rows(HANG_AT if mine else None), batch_size=None, num_workers=1, multiprocessing_context="fork"
            )
        for batch in run.steps(data, total=total):
            here = mine and run.step == HANG_AT
            time.sleep(0.01)
            if here and where == "step":
                threading.Event().wait()
            loss = model(batch).sum()
            loss.backward()
            if here and where == "exchange":
                dist.recv(torch.zeros(1), src=(run.rank + 1) % run.world_size)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            if run.step % 3 == 2:
                with run.section("eval"):
                    if mine and where == "eval" and run.step >= HANG_AT:
                        hang()
                    dist.all_reduce(torch.zeros(1))

    main()


def train_unevenly(place: str, victim: int, factor: float, reports: int, note: str) -> None:
    """Train until rank 0 has scored some reports; the victim computes so many times as long as the others."""
    from resilient.events import StragglerFound

    found: list[list[Any]] = []

    @resilient.train(place, every=10**6, compare_every_s=0.25, on_hang="off")
    def main(run: resilient.Run) -> None:
        torch.set_num_threads(1)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        run.track(model=model, optimizer=optimizer)
        watch = run._watched._stragglers
        assert watch is not None
        run._bus.subscribe(
            lambda event: (
                found.append([event.straggler, event.section, event.own_s, event.best_s])
                if isinstance(event, StragglerFound)
                else None
            )
        )
        enough = torch.zeros(1)
        for batch in run.steps([torch.ones(4)] * 100_000):
            # A device that computes for so long, and is waited for in the forward pass: it needs no processor here.
            time.sleep(0.008 * (factor if run.rank == victim else 1.0))
            model(batch).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            enough[0] = watch.reports
            dist.broadcast(enough, 0)
            if enough >= reports:
                break
        if run.rank == 0:
            import json
            from pathlib import Path

            Path(note).write_text(json.dumps({"reports": watch.reports, "found": found}))

    main()
