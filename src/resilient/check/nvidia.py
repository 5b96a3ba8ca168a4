"""What NVIDIA's driver says about its devices: errors of memory, rows that were remapped, throttling, clocks.

Read with ``nvidia-smi -q -x``, NVIDIA's own program over NVML: it comes with the driver, and can be ended when the
driver hangs, which a library in this process cannot. Elements as in the DTD that its output names (nvsmi_device_v12).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from xml.etree import ElementTree as ET

from resilient.check.context import Context, read_number
from resilient.check.limits import Limits
from resilient.check.result import Result, Status, failed, passed, skipped

NAME: Final = "NVIDIA devices"

_TIMEOUT_S: Final = 20.0
_VENDOR: Final = 0x10DE
_SLOWING: Final = {
    "hw_slowdown": "hardware slowdown (heat or power)",
    "hw_thermal_slowdown": "hardware slowdown by heat",
    "hw_power_brake_slowdown": "the power brake of the server",
    "sw_thermal_slowdown": "slowdown by heat",
}
"""Reasons of a lower clock that no healthy device has; idle, settings and the power cap are everyday ones (Azure)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device; None is what this driver or device does not tell. Clocks are MHz."""

    address: str
    name: str
    uncorrectable: int = 0
    remapped_uncorrectable: int = 0
    remap_pending: bool = False
    remap_failed: bool = False
    recovery: str = ""
    slowed_by: tuple[str, ...] = ()
    clock: float | None = None
    max_clock: float | None = None


def check(context: Context) -> list[Result]:
    """Ask nvidia-smi, if there is a device of NVIDIA or the program itself."""
    expected = devices(context)
    program = shutil.which("nvidia-smi")
    if program is None:
        if expected:
            return [failed(NAME, f"{expected} devices and no nvidia-smi", "install the driver's tools")]
        return [skipped(NAME, "no device of NVIDIA here")]
    try:
        text = ask(program)
    except subprocess.TimeoutExpired:
        return [_hangs()]
    except subprocess.CalledProcessError as error:
        return [judge_refusal(str(error.stdout or "") + str(error.stderr or ""))]
    return judge(parse(text), expected, context.limits)


def ask(program: str = "nvidia-smi") -> str:
    """Return what ``nvidia-smi -q -x`` prints.

    Raises:
        subprocess.SubprocessError: it does not end in time, or ends with an error.
    """
    command = [program, "-q", "-x"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S).stdout  # noqa: S603 -- no shell, fixed words


def devices(context: Context) -> int:
    """Return how many GPUs of NVIDIA there are on the PCI bus."""
    found = 0
    for device in context.path("sys/bus/pci/devices").glob("*"):
        display = (read_number(device / "class") or 0) >> 8 in {0x0300, 0x0302}
        found += display and read_number(device / "vendor") == _VENDOR and not _passed_on(device.name, context)
    return found


def _passed_on(address: str, context: Context) -> bool:
    """Return whether a device is given to a virtual machine: the driver does not have it, rightly."""
    driver = context.path("sys/bus/pci/devices", address, "driver")
    return driver.exists() and driver.resolve().name == "vfio-pci"


def parse(text: str) -> list[Gpu]:
    """Return the devices in what nvidia-smi printed, of drivers from 450 to 580.

    Raises:
        ValueError: it is no such output.
    """
    try:
        root = ET.fromstring(text)  # noqa: S314 -- the driver's own program wrote it
    except ET.ParseError as error:
        raise ValueError(f"nvidia-smi printed no XML: {error}") from error
    return [_gpu(element) for element in root.iter("gpu")]


def _gpu(element: ET.Element) -> Gpu:
    def said(*paths: str) -> str:
        found = (element.findtext(path) for path in paths)
        return next((text.strip() for text in found if text and text.strip() not in {"N/A", ""}), "")

    reasons = next((found for tag in _REASONS if (found := element.find(tag)) is not None), None)
    active = {
        child.tag.partition("_reason_")[2]
        for child in (() if reasons is None else reasons)
        if (child.text or "").strip() == "Active"
    }
    volatile = element.find("ecc_errors/volatile")
    counts = [child for child in volatile.iter() if child.tag in _UNCORRECTABLE] if volatile is not None else []
    return Gpu(
        address=element.get("id", ""),
        name=said("product_name"),
        uncorrectable=sum(int(_number(child.text) or 0) for child in counts)
        + int(_number(said("ecc_errors/volatile/double_bit/total")) or 0),
        remapped_uncorrectable=int(_number(said("remapped_rows/remapped_row_unc")) or 0),
        remap_pending="Yes" in {said("remapped_rows/remapped_row_pending"), said(*_PENDING_PAGES)},
        remap_failed=said("remapped_rows/remapped_row_failure") == "Yes",
        recovery=said("gpu_recovery_action"),
        slowed_by=tuple(reason for reason in _SLOWING if reason in active),
        clock=_number(said("clocks/sm_clock")),
        max_clock=_number(said("max_clocks/sm_clock")),
    )


_REASONS: Final = ("clocks_event_reasons", "clocks_throttle_reasons")  # the second until driver 530
_PENDING_PAGES: Final = ("retired_pages/pending_retirement", "retired_pages/pending_blacklist")  # before Ampere
_UNCORRECTABLE: Final = frozenset(
    {"sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable"}
)


def _number(text: str | None) -> float | None:
    """Return the number in ``1980 MHz``."""
    try:
        return float((text or "").split()[0])
    except (IndexError, ValueError):
        return None


def judge(gpus: Sequence[Gpu], expected: int, limits: Limits, *, loaded: bool = False) -> list[Result]:
    """Return a line for each fault of each device, or one for all. ``loaded``: they are at work, so clocks count."""
    results = [result for gpu in gpus for result in _faults(gpu, limits, loaded=loaded)]
    if len(gpus) < expected:
        line = f"{expected} devices are on the PCI bus, the driver has {len(gpus)}"
        remedy = "unless this job was given a part of them: look for XID 79 in the kernel log; restart the machine"
        results.insert(0, failed(NAME, line, remedy, doubtful=True))
    if results:
        return results
    if not gpus:
        return [skipped(NAME, "no device of NVIDIA here")]
    return [passed(NAME, f"{len(gpus)} x {gpus[0].name}: no uncorrected error, no remap due, no slowdown")]


def _faults(gpu: Gpu, limits: Limits, *, loaded: bool) -> list[Result]:
    found: list[tuple[str, str]] = []
    replace, reset = (
        "take this node out and have the device replaced",
        "reset the device (nvidia-smi -r) or restart the machine",
    )
    if gpu.remap_failed:
        found.append(("a row of its memory could not be remapped", replace))
    elif gpu.remapped_uncorrectable > limits.uncorrectable_remaps:
        found.append(
            (f"{gpu.remapped_uncorrectable} rows of its memory were remapped for uncorrectable errors", replace)
        )
    elif gpu.remap_pending:
        found.append(("a row of its memory is to be remapped (remap pending)", reset))
    if gpu.uncorrectable and not gpu.remap_pending:
        found.append((f"{gpu.uncorrectable} uncorrectable errors of its memory since the driver was loaded", reset))
    if gpu.recovery and gpu.recovery != "None":
        found.append((f"the driver asks for a recovery action: {gpu.recovery}", reset))
    results = [failed(NAME, f"{gpu.address}: {line}", remedy, subject=gpu.address) for line, remedy in found]
    if gpu.slowed_by:
        results.append(_slow(gpu, f"its clock is lowered: {_SLOWING[gpu.slowed_by[-1]]}", limits))
    elif loaded and gpu.clock is not None and gpu.max_clock and gpu.clock < limits.clock_ratio * gpu.max_clock:
        results.append(_slow(gpu, f"at work its clock is {gpu.clock:g} of {gpu.max_clock:g} MHz", limits))
    return results


def _slow(gpu: Gpu, what: str, limits: Limits) -> Result:
    return Result(
        name=NAME,
        status=Status.SLOW,
        line=f"{gpu.address}: {what}",
        remedy="check fans, air flow, power supplies, and locked clocks (nvidia-smi -rgc)",
        subject=gpu.address,
        figure=gpu.clock,
        unit="MHz",
        limit=None if gpu.max_clock is None else limits.clock_ratio * gpu.max_clock,
    )


def judge_refusal(text: str) -> Result:
    """Judge what nvidia-smi said when it ended with an error."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no word")
    return failed(NAME, f"nvidia-smi failed: {line}", "look for XID 79 in the kernel log; restart the machine")


def _hangs() -> Result:
    line = f"nvidia-smi did not end in {_TIMEOUT_S:g} s: the driver hangs"
    return failed(NAME, line, "restart the machine; if it comes back, have the device replaced")
