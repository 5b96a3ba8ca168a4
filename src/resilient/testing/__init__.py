"""What a user proves a store, or a job, with: conformance, faults, invariants, a simulated cluster.

These names load at first use: importing this package imports neither torch nor pytest. ``docs/testing.md`` shows them
at work; the fixtures are in `resilient.testing.plugin`, which pytest finds by itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilient.testing.bugs import planted
    from resilient.testing.cluster import BrokenPromiseError, Cluster
    from resilient.testing.conformance import StoreConformance
    from resilient.testing.faulty_store import Crashed, Fault, FaultyStore, Mode, Operation
    from resilient.testing.invariants import Violation, check_run, read_arrays
    from resilient.testing.nth import Scenario, fail_each_operation
    from resilient.testing.processes import (
        ProcessFaults,
        SmallPlace,
        full_dev_shm,
        full_disk,
        hang,
        hog_memory,
        hold_gil,
        kill,
        kill_at_random,
        leave,
        resume,
        segfault,
        stop,
    )
    from resilient.testing.proxy import FaultProxy, HttpFault, HttpRequest, HttpRule

_HOME = {
    "BrokenPromiseError": "resilient.testing.cluster",
    "Cluster": "resilient.testing.cluster",
    "Crashed": "resilient.testing.faulty_store",
    "Fault": "resilient.testing.faulty_store",
    "FaultProxy": "resilient.testing.proxy",
    "FaultyStore": "resilient.testing.faulty_store",
    "HttpFault": "resilient.testing.proxy",
    "HttpRequest": "resilient.testing.proxy",
    "HttpRule": "resilient.testing.proxy",
    "Mode": "resilient.testing.faulty_store",
    "Operation": "resilient.testing.faulty_store",
    "ProcessFaults": "resilient.testing.processes",
    "Scenario": "resilient.testing.nth",
    "SmallPlace": "resilient.testing.processes",
    "StoreConformance": "resilient.testing.conformance",
    "Violation": "resilient.testing.invariants",
    "check_run": "resilient.testing.invariants",
    "fail_each_operation": "resilient.testing.nth",
    "full_dev_shm": "resilient.testing.processes",
    "full_disk": "resilient.testing.processes",
    "hang": "resilient.testing.processes",
    "hog_memory": "resilient.testing.processes",
    "hold_gil": "resilient.testing.processes",
    "kill": "resilient.testing.processes",
    "kill_at_random": "resilient.testing.processes",
    "leave": "resilient.testing.processes",
    "planted": "resilient.testing.bugs",
    "read_arrays": "resilient.testing.invariants",
    "resume": "resilient.testing.processes",
    "segfault": "resilient.testing.processes",
    "stop": "resilient.testing.processes",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'resilient.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return list(__all__)


__all__ = [
    "BrokenPromiseError",
    "Cluster",
    "Crashed",
    "Fault",
    "FaultProxy",
    "FaultyStore",
    "HttpFault",
    "HttpRequest",
    "HttpRule",
    "Mode",
    "Operation",
    "ProcessFaults",
    "Scenario",
    "SmallPlace",
    "StoreConformance",
    "Violation",
    "check_run",
    "fail_each_operation",
    "full_dev_shm",
    "full_disk",
    "hang",
    "hog_memory",
    "hold_gil",
    "kill",
    "kill_at_random",
    "leave",
    "planted",
    "read_arrays",
    "resume",
    "segfault",
    "stop",
]
