"""What nvidia-smi prints, good and bad.

The outputs are written by hand from NVIDIA's documented elements (the DTD that ``nvidia-smi -q -x`` names, and
"GPU Memory Error Management", "XID Errors"): no device was at hand.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resilient.check import nvidia
from resilient.check.context import Context
from resilient.check.limits import Limits
from resilient.check.nvidia import judge, parse
from resilient.check.result import Result, Status
from tests.check.roots import write

LIMITS = Limits()
REASONS = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "display_clocks_setting",
)
GOOD = f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <driver_version>570.86.15</driver_version>
  <attached_gpus>1</attached_gpus>
  <gpu id="00000000:3B:00.0">
    <product_name>NVIDIA H100 80GB HBM3</product_name>
    <clocks_event_reasons>
      {"".join(f"<clocks_event_reason_{name}>Not Active</clocks_event_reason_{name}>" for name in REASONS)}
    </clocks_event_reasons>
    <ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>
    <ecc_errors>
      <volatile>
        <sram_correctable>0</sram_correctable>
        <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
        <sram_uncorrectable_secded>0</sram_uncorrectable_secded>
        <dram_correctable>4</dram_correctable>
        <dram_uncorrectable>0</dram_uncorrectable>
      </volatile>
      <aggregate><dram_uncorrectable>1</dram_uncorrectable></aggregate>
    </ecc_errors>
    <retired_pages><pending_blacklist>N/A</pending_blacklist><pending_retirement>N/A</pending_retirement></retired_pages>
    <remapped_rows>
      <remapped_row_corr>1</remapped_row_corr>
      <remapped_row_unc>0</remapped_row_unc>
      <remapped_row_pending>No</remapped_row_pending>
      <remapped_row_failure>No</remapped_row_failure>
    </remapped_rows>
    <gpu_recovery_action>None</gpu_recovery_action>
    <clocks><graphics_clock>345 MHz</graphics_clock><sm_clock>1980 MHz</sm_clock></clocks>
    <max_clocks><graphics_clock>1980 MHz</graphics_clock><sm_clock>1980 MHz</sm_clock></max_clocks>
  </gpu>
</nvidia_smi_log>
"""
OLD = """<nvidia_smi_log><gpu id="00000000:00:1E.0"><product_name>Tesla V100-SXM2-16GB</product_name>
<clocks_throttle_reasons>
  <clocks_throttle_reason_hw_slowdown>Not Active</clocks_throttle_reason_hw_slowdown>
</clocks_throttle_reasons>
<ecc_errors><volatile><double_bit><device_memory>0</device_memory><total>0</total></double_bit></volatile></ecc_errors>
<retired_pages><pending_retirement>No</pending_retirement></retired_pages>
<remapped_rows>N/A</remapped_rows><clocks><sm_clock>1530 MHz</sm_clock></clocks></gpu></nvidia_smi_log>"""


def changed(*changes: tuple[str, str], text: str = GOOD) -> str:
    for name, value in changes:
        before, tag, after = text.partition(f"<{name}>")
        assert tag, name
        text = f"{before}{tag}{value}<{after.partition('<')[2]}"
    return text


def judged(text: str, expected: int = 1, *, loaded: bool = False) -> list[Result]:
    return judge(parse(text), expected, LIMITS, loaded=loaded)


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        OLD,
        changed(("clocks_event_reason_gpu_idle", "Active")),
        changed(("clocks_event_reason_sw_power_cap", "Active")),
    ],
)
def test_a_healthy_device_passes(text: str) -> None:
    (result,) = judged(text)
    assert result.status is Status.OK
    assert result.line.endswith("no uncorrected error, no remap due, no slowdown")


@pytest.mark.parametrize(
    ("text", "status", "line"),
    [
        (changed(("remapped_row_pending", "Yes")), "failed", "a row of its memory is to be remapped (remap pending)"),
        (changed(("remapped_row_failure", "Yes")), "failed", "a row of its memory could not be remapped"),
        (
            changed(("remapped_row_unc", "513")),
            "failed",
            "513 rows of its memory were remapped for uncorrectable errors",
        ),
        (
            changed(("sram_uncorrectable_secded", "2")),
            "failed",
            "2 uncorrectable errors of its memory since the driver was loaded",
        ),
        (changed(("gpu_recovery_action", "GPU Reset")), "failed", "the driver asks for a recovery action: GPU Reset"),
        (
            changed(
                ("clocks_event_reason_hw_slowdown", "Active"), ("clocks_event_reason_hw_thermal_slowdown", "Active")
            ),
            "slow",
            "its clock is lowered: hardware slowdown by heat",
        ),
        (
            changed(("clocks_event_reason_hw_power_brake_slowdown", "Active")),
            "slow",
            "its clock is lowered: the power brake of the server",
        ),
        (
            changed(("pending_retirement", "Yes"), text=OLD),
            "failed",
            "a row of its memory is to be remapped (remap pending)",
        ),
        (
            changed(("total", "1"), text=OLD),
            "failed",
            "1 uncorrectable errors of its memory since the driver was loaded",
        ),
        (
            changed(("clocks_throttle_reason_hw_slowdown", "Active"), text=OLD),
            "slow",
            "its clock is lowered: hardware slowdown (heat or power)",
        ),
    ],
)
def test_a_bad_device_fails_with_one_line(text: str, status: str, line: str) -> None:
    (result,) = judged(text)
    address = "00000000:00:1E.0" if "V100" in text else "00000000:3B:00.0"
    assert (result.status, result.line) == (status, f"{address}: {line}")
    assert result.remedy


def test_a_low_clock_counts_only_at_work() -> None:
    low = changed(("sm_clock", "345 MHz"))
    assert judged(low)[0].status is Status.OK
    (result,) = judged(low, loaded=True)
    assert (result.status, result.line) == (Status.SLOW, "00000000:3B:00.0: at work its clock is 345 of 1980 MHz")


def test_a_device_that_the_driver_has_lost_is_counted() -> None:
    (result,) = judged(GOOD, expected=8)
    assert (result.status, result.line) == (Status.FAILED, "8 devices are on the PCI bus, the driver has 1")


def bus(root: Path) -> Context:
    """A GPU for the driver, one for a virtual machine, and a network card."""
    for address, vendor, kind in (
        ("0000:3b:00.0", "10de", "0302"),
        ("0000:5e:00.0", "10de", "0302"),
        ("0000:86:00.0", "15b3", "0207"),
    ):
        write(
            root,
            {
                f"sys/bus/pci/devices/{address}/vendor": f"0x{vendor}\n",
                f"sys/bus/pci/devices/{address}/class": f"0x{kind}00\n",
            },
        )
    (root / "sys/bus/pci/drivers/vfio-pci").mkdir(parents=True)
    (root / "sys/bus/pci/devices/0000:5e:00.0/driver").symlink_to(root / "sys/bus/pci/drivers/vfio-pci")
    return Context(root=str(root))


def program(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_program_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = bus(tmp_path)
    assert nvidia.devices(context) == 1
    (tmp_path / "out.xml").write_text(GOOD)
    program(tmp_path, f"cat {tmp_path}/out.xml", monkeypatch)
    assert [each.status for each in nvidia.check(context)] == ["ok"]


def test_a_program_that_fails_or_hangs_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = bus(tmp_path)
    text = (
        "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover this GPU"
    )
    program(tmp_path, f"echo '{text}'; exit 15", monkeypatch)
    (result,) = nvidia.check(context)
    assert (result.status, result.line) == (Status.FAILED, f"nvidia-smi failed: {text}")
    monkeypatch.setattr(nvidia, "_TIMEOUT_S", 0.2)
    program(tmp_path, "exec sleep 60", monkeypatch)
    (result,) = nvidia.check(context)
    assert (result.status, result.line) == (Status.FAILED, "nvidia-smi did not end in 0.2 s: the driver hangs")
    program(tmp_path, "echo no XML", monkeypatch)
    with pytest.raises(ValueError, match="nvidia-smi printed no XML"):
        nvidia.check(context)


def test_where_there_is_no_device_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [each.status for each in nvidia.check(Context(root=str(tmp_path)))] == ["skipped"]
    assert [each.status for each in nvidia.check(bus(tmp_path))] == ["failed"]
