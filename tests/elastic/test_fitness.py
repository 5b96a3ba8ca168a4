"""A node that is unfit stays out, what was found is written down, and nothing of that needs a healthy store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from resilient.catalog.evidence import write_evidence
from resilient.catalog.generations import claim_generation
from resilient.check.context import Level
from resilient.check.result import Result, Status, failed, passed
from resilient.check.suite import CHECKS, Check
from resilient.clock import SYSTEM_CLOCK
from resilient.config import Settings
from resilient.elastic import fitness, handler, this_node
from resilient.elastic.fitness import Fitness, read_record
from resilient.errors import ConflictError, ErrorKind, StoreError
from resilient.format.evidence import Evidence
from resilient.store.base import Store
from resilient.store.memory import MemoryStore
from resilient.store.open import open_store


class Machine:
    """What the checks find, by the name of the check; healthy where nothing is said."""

    def __init__(self, **bad: Result) -> None:
        self.bad = bad
        self.looked_at: list[str] = []
        self.levels: set[Level] = set()

    def __call__(self, level: Level, checks: Sequence[Check]) -> list[Result]:
        self.levels.add(level)
        names = [check.name for check in checks]
        self.looked_at += names
        return [self.bad.get(name.replace("-", "_"), passed(name, "fine")) for name in names]


def fit(store: Any, machine: Machine) -> Fitness:
    return Fitness(store, "host/1", "job", clock=SYSTEM_CLOCK, run=machine)


def test_a_device_that_has_fallen_off_the_bus_keeps_its_node_out() -> None:
    store = MemoryStore()
    lost = failed("kernel log", "XID 79 on 0000:3b:00", "restart the machine")
    fewer = failed("NVIDIA devices", "8 are on the bus, the driver has 7", "restart the machine", doubtful=True)
    with pytest.raises(ConflictError, match=r"\(host/1\) is not fit to take part: kernel log: XID 79") as caught:
        fit(store, Machine(kernel_log=lost, nvidia=fewer)).before_joining()
    assert caught.value.kind is ErrorKind.UNFIT_NODE
    assert "restart the machine" in str(caught.value.hint)
    record = read_record(store, "host/1")
    assert record is not None
    assert (record.status, record.findings, record.occasion) == (Status.FAILED, (lost, fewer), "before joining")


def test_what_may_be_no_fault_of_the_node_keeps_it_in() -> None:
    xid = failed("kernel log", "XID 79 on 0000:3b:00", "restart the machine")
    fewer = failed("NVIDIA devices", "8 are on the bus, the driver has 4", "restart the machine", doubtful=True)
    hung = failed("accelerator", "did not end in 40 s", "see the kernel log", doubtful=True)
    for machine in (Machine(kernel_log=xid), Machine(nvidia=fewer), Machine(accelerator=hung)):
        fit(MemoryStore(), machine).before_joining()

    def no_process(level: Level, checks: Sequence[Check]) -> list[Result]:
        raise OSError(24, "Too many open files")

    Fitness(MemoryStore(), "host", "job", clock=SYSTEM_CLOCK, run=no_process).before_joining()


def failed_generation(store: Store, host: str, line: str) -> None:
    """Leave what a rank on that host says of its failure in generation 1."""
    claim = claim_generation(store, world_size=2, launch="launch", heartbeat=False)
    assert claim.generation == 1
    write_evidence(
        store,
        Evidence(
            generation=1,
            nonce=claim.nonce,
            world_size=2,
            rank=1,
            first_rank=1,
            local_world_size=1,
            host=host,
            pid=1,
            clock="boot",
            monotonic_s=1.0,
            wall_s=1.0,
            created="2026-01-01T00:00:00Z",
            lines=(line,),
        ),
    )


ECC = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"


def test_a_node_by_whose_fault_an_attempt_failed_takes_no_more_part_in_that_job() -> None:
    store = MemoryStore()
    failed_generation(store, "host/1", ECC)
    with pytest.raises(ConflictError, match=r"takes no more part in the job job: .*device-hardware.*ECC") as caught:
        fit(store, Machine()).after_attempt(Settings(), has_spare=True)
    assert caught.value.kind is ErrorKind.UNFIT_NODE
    with pytest.raises(ConflictError, match="ECC"):
        fit(store, Machine()).before_joining()
    Fitness(store, "host/1", "another job", clock=SYSTEM_CLOCK, run=Machine()).before_joining()


@pytest.mark.parametrize("line", [ECC, "ValueError: no label"])
def test_no_other_node_is_excluded_and_none_by_the_programs_error_or_without_a_spare(line: str) -> None:
    for host, has_spare, policy in (("other", True, "act"), ("host/1", False, "act"), ("host/1", True, "observe")):
        store = MemoryStore()
        failed_generation(store, host, line)
        fit(store, Machine()).after_attempt(Settings(policy=policy), has_spare=has_spare)
    store = MemoryStore()
    failed_generation(store, "host/1", "ValueError: no label")
    fit(store, Machine()).after_attempt(Settings(), has_spare=True)


def test_after_a_failure_that_began_here_and_may_be_the_platforms_all_is_looked_at_thoroughly() -> None:
    for line, level in (
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "full"),
        ("ValueError: no label", "light"),
    ):
        store, machine = MemoryStore(), Machine()
        failed_generation(store, "host/1", line)
        fit(store, machine).after_attempt(Settings(), has_spare=True)
        assert machine.levels == {level}, line


def test_what_may_be_nobodys_loss_is_told_and_written_down_and_the_node_joins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, small = MemoryStore(), failed("/dev/shm", "64 MiB", "--shm-size=16g")
    fit(store, Machine(shared_memory=small)).before_joining()
    assert "64 MiB; --shm-size=16g" in caplog.text
    record = read_record(store, "host/1")
    assert record is not None
    assert (record.status, record.findings) == (Status.SLOW, (small,))
    fit(store, Machine()).before_joining()
    record = read_record(store, "host/1")
    assert record is not None
    assert (record.status, record.findings) == (Status.OK, ()), "mended"


def test_before_joining_all_is_looked_at_and_after_an_attempt_what_takes_no_time() -> None:
    before, after = Machine(), Machine()
    fit(MemoryStore(), before).before_joining()
    fit(MemoryStore(), after).after_attempt(Settings(), has_spare=True)
    assert sorted(before.looked_at) == sorted(check.name for check in CHECKS)
    assert {"kernel-log", "nvidia"} <= set(after.looked_at) < set(before.looked_at)


def test_a_store_that_is_away_keeps_no_healthy_node_out() -> None:
    class Away(MemoryStore):
        def put(self, *_: object) -> None:
            raise StoreError("away", kind=ErrorKind.UNREACHABLE)

    fit(Away(), Machine()).before_joining()


def test_the_backend_examines_its_node_if_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIENT_NODE_DIR", "")
    monkeypatch.setenv("RESILIENT_EXITS_DIR", str(tmp_path / "exits"))

    def parameters(**conf: str) -> RendezvousParameters:
        return RendezvousParameters("resilient", str(tmp_path / "place"), "job", 1, 1, check_command="0", **conf)

    made = handler.create(parameters(check="light"))
    assert read_record(open_store(tmp_path / "place"), this_node.host()) is not None
    made._leave()
    dying = failed("processor", "core 3 computes wrongly", "replace the machine")
    monkeypatch.setattr(fitness, "_checked", Machine(processor=dying))
    handler.create(parameters())._leave()
    with pytest.raises(ConflictError, match="core 3 computes wrongly"):
        handler.create(parameters(check="light"))
