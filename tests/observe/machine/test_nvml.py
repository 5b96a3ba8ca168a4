"""Power and use of accelerators, from a library that stands in for NVIDIA's: there is no device here."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from resilient.observe.machine.nvml import Accelerators, open_nvml


class NVMLError(Exception):
    pass


def library(watts: list[int | None], percents: list[int | None], *, driver: bool = True) -> ModuleType:
    """Return a module like ``pynvml`` for devices of so many milliwatts and percent; None: it does not tell."""
    found = ModuleType("pynvml")

    def tells(value: int | None) -> int:
        if value is None:
            raise NVMLError("not supported")
        return value

    def init() -> None:
        if not driver:
            raise NVMLError("driver not loaded")

    names = {
        "NVMLError": NVMLError,
        "nvmlInit": init,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(watts),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetPowerUsage": lambda index: tells(watts[index]),
        "nvmlDeviceGetUtilizationRates": lambda index: SimpleNamespace(gpu=tells(percents[index])),
    }
    vars(found).update(names)
    return found


@pytest.mark.parametrize(
    ("watts", "percents", "expected"),
    [
        ([300_000, 500_500], [100, 50], Accelerators(800.5, 0.75)),
        ([300_000, None], [None, 20], Accelerators(300.0, 0.2)),
        ([None], [None], Accelerators(None, None)),
    ],
    ids=["two", "some tell", "none tells"],
)
def test_watts_are_summed_up_and_use_is_the_mean(
    monkeypatch: pytest.MonkeyPatch, watts: list[int | None], percents: list[int | None], expected: Accelerators
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library(watts, percents))
    found = open_nvml()
    assert found is not None
    assert found.read() == expected
    found.close()


def test_nothing_is_read_without_library_driver_or_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    assert open_nvml() is None
    monkeypatch.setitem(sys.modules, "pynvml", library([1], [1], driver=False))
    assert open_nvml() is None
    monkeypatch.setitem(sys.modules, "pynvml", library([], []))
    assert open_nvml() is None
