"""Power and use of NVIDIA's accelerators, where the package nvidia-ml-py is installed."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple


class Accelerators(NamedTuple):
    """Of all accelerators of a machine: watts together, and the mean share of time in which a kernel ran, 0 to 1."""

    power_w: float | None
    busy: float | None


class Nvml:
    """NVIDIA's management library; made by `open_nvml`."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._devices = [library.nvmlDeviceGetHandleByIndex(each) for each in range(library.nvmlDeviceGetCount())]

    def __len__(self) -> int:
        return len(self._devices)

    def read(self) -> Accelerators:
        """Ask each of them; what one does not tell is left out."""
        watts = [self._ask(self._library.nvmlDeviceGetPowerUsage, each) for each in self._devices]
        shares = [self._ask(self._library.nvmlDeviceGetUtilizationRates, each) for each in self._devices]
        power = [value / 1000 for value in watts if value is not None]
        busy = [value.gpu / 100 for value in shares if value is not None]
        return Accelerators(sum(power) if power else None, sum(busy) / len(busy) if busy else None)

    def close(self) -> None:
        self._ask(self._library.nvmlShutdown)

    def _ask(self, question: Any, *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except self._library.NVMLError:
            return None  # not every device tells everything, and one may be lost


def open_nvml() -> Nvml | None:
    """Return the library with its devices; None where it, the driver, or any device is missing."""
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
        found = Nvml(library)
    except library.NVMLError:
        return None
    if not len(found):
        found.close()
        return None
    return found
