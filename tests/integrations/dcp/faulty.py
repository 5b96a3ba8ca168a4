"""Writers and readers that fail in chosen hooks on chosen ranks, and what each rank then sees."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from resilient.integrations.dcp import StorageReader, StorageWriter
from tests.integrations.dcp.shards import Spec, blank, differing, dtensors

warnings.simplefilter("ignore")

Faults = Mapping[str, list[int]]
"""The ranks on which a hook fails, by its name; ``later`` after it: in the future that it returns."""


class InjectedError(Exception):
    pass


class Faulty:
    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def at(self, hook: str) -> None:
        if dist.get_rank() in self.faults.get(hook, ()):
            raise InjectedError(f"{hook} on rank {dist.get_rank()}")

    def failed(self, hook: str) -> Future[Any] | None:
        try:
            self.at(f"{hook} later")
        except InjectedError as error:
            future: Future[Any] = Future()
            future.set_exception(error)
            return future
        return None


class FaultyWriter(StorageWriter):
    def __init__(self, url: str, step: int, faults: Faults) -> None:
        super().__init__(url, step)
        self.faulty = Faulty(faults)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.faulty.at("set_up_storage_writer")
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.faulty.at("prepare_local_plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        made = super().prepare_global_plan(plans)
        self.faulty.at("prepare_global_plan")
        return made

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.faulty.at("write_data")
        written = super().write_data(plan, planner)
        return self.faulty.failed("write_data") or written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.faulty.at("finish")
        super().finish(metadata, results)


class FaultyReader(StorageReader):
    def __init__(self, url: str, faults: Faults) -> None:
        super().__init__(url)
        self.faulty = Faulty(faults)

    def read_metadata(self, *args: Any, **ranks: Any) -> Metadata:
        self.faulty.at("read_metadata")
        return super().read_metadata(*args, **ranks)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.faulty.at("set_up_storage_reader")
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        self.faulty.at("prepare_local_plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        self.faulty.at("prepare_global_plan")
        return super().prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self.faulty.at("read_data")
        done = super().read_data(plan, planner)
        return self.faulty.failed("read_data") or done


SPECS: list[Spec] = [("w", (9, 4), "float32", (0,)), ("v", (4, 6), "float64", (1,))]


def state() -> dict[str, Any]:
    return {"model": dtensors(SPECS, (dist.get_world_size(),)), "step": 1}


def blamed(act: Any) -> list[int]:
    """Return the ranks that an exception blames, having seen that it carries what was injected there."""
    try:
        act()
    except dcp.CheckpointException as error:
        for failure, _ in error.failures.values():
            assert isinstance(failure, InjectedError), failure
        return sorted(error.failures)
    return []


def save_with(url: str, step: int, faults: Faults, *, asynchronous: bool) -> list[int]:
    writer = FaultyWriter(url, step, faults)
    if not asynchronous:
        return blamed(lambda: dcp.save(state(), storage_writer=writer))
    return blamed(lambda: dcp.async_save(state(), storage_writer=writer).result())  # type: ignore[union-attr]


def all_saves(url: str, cases: list[Faults], asynchronous: bool) -> list[list[int]]:
    return [save_with(url, 2, faults, asynchronous=asynchronous) for faults in cases]


def load_with(url: str, faults: Faults) -> list[int]:
    into = {"model": blank(state()["model"]), "step": 0}
    return blamed(lambda: dcp.load(into, storage_reader=FaultyReader(url, faults)))


def all_loads(url: str, cases: list[Faults]) -> list[list[int]]:
    return [load_with(url, faults) for faults in cases]


def save(url: str, step: int) -> None:
    dcp.save(state(), storage_writer=StorageWriter(url, step))


def load(url: str) -> list[str]:
    into: dict[str, Any] = {"model": blank(state()["model"]), "step": 0}
    dcp.load(into, storage_reader=StorageReader(url))
    assert into["step"] == 1
    return differing(state()["model"], into["model"])


def save_values(url: str, bad: list[int]) -> list[str]:
    """Save with an object that cannot be stored, on some ranks; return what each blamed rank is said to have."""
    name = f"of rank {dist.get_rank()}"
    whole = {"w": torch.ones(2), name: (lambda: None) if dist.get_rank() in bad else 1}
    try:
        dcp.save(whole, storage_writer=StorageWriter(url))
    except dcp.CheckpointException as error:
        return [f"{rank}: {failure}" for rank, (failure, _) in sorted(error.failures.items())]
    return []
