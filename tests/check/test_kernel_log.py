"""XIDs in the kernel's log.

The messages are written by hand in the form that NVIDIA documents ("XID Errors", "Dynamic Page Retirement"), framed as
Linux frames them (Documentation/ABI/testing/dev-kmsg; dmesg; journalctl -o short-monotonic): no device was at hand.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resilient.check import kernel_log
from resilient.check.context import Context
from resilient.check.kernel_log import XIDS, Group, judge, parse
from resilient.check.limits import Limits
from resilient.check.result import Status
from tests.check.roots import write

LIMITS = Limits()
LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
REMAP = "NVRM: Xid (PCI:0000:3b:00): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate."
USER = (
    "NVRM: Xid (PCI:0000:5e:00): 31, pid=79749, name=python, Ch 0000000a, MMU Fault: ENGINE GRAPHICS faulted @ 0x2b57"
)
FRAMES = ("4,1339,7206000000,-;{}", "[ 7206.000000] {}", "[ 7206.000000] node17 kernel: {}")


@pytest.mark.parametrize("frame", FRAMES, ids=["kmsg", "dmesg", "journalctl"])
def test_a_device_that_fell_off_the_bus_fails_with_one_line(frame: str) -> None:
    lines = [frame.format("EXT4-fs (sda1): mounted"), frame.format(LOST), "torn"]
    (xid,) = parse(lines)
    assert (xid.number, xid.device, xid.at_s) == (79, "0000:3b:00", 7206.0)
    (result,) = judge([xid], 7206.0 + 300, LIMITS)
    assert result.status is Status.FAILED
    assert result.line == (
        "XID 79 of 0000:3b:00 5 min ago: the device has fallen off the bus "
        "(the device, its memory or its link is faulty)"
    )
    assert result.remedy == "take this node out and have the device looked at"


def test_a_remap_asks_for_a_reset() -> None:
    (result,) = judge(parse([f"[ 100.0] {REMAP}"]), 200.0, LIMITS)
    assert result.status is Status.FAILED
    assert "XID 63" in result.line
    assert result.remedy.startswith("reset the device")


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ([], "no XID in the last 2 h"),
        ([f"[ 100.0] {LOST}"], "no XID in the last 2 h"),  # long ago
        ([f"[ 9000.0] {USER}"], "XID 31: a fault of the program, on its own no fault of the node"),
        (["[ 9000.0] NVRM: Xid (PCI:0000:01:00): 999, new"], "XID 999: not in the table of this version"),
        (["[ 9000.0] NVRM: GPU 0000:01:00.0: RmInitAdapter failed!"], "no XID in the last 2 h"),
    ],
)
def test_what_does_not_accuse_the_node_passes(lines: list[str], line: str) -> None:
    (result,) = judge(parse(lines), 9100.0, LIMITS)
    assert (result.status, result.line) == (Status.OK, line)


def test_one_line_for_each_device_and_number() -> None:
    lines = [f"[ 100.0] {LOST}"] * 50 + [f"[ 101.0] {REMAP}", f"[ 102.0] {USER}"]
    assert [each.line.split()[1] for each in judge(parse(lines), 200.0, LIMITS)] == ["63", "79"]


def test_the_table_has_what_azure_and_sichek_look_for() -> None:
    """Both take a node out for these; none of them may count as the program's fault."""
    azure = {48, 56, 57, 58, 62, 63, 64, 65, 68, 69, 73, 74, 79, 80, 81, 92, 119, 120}
    sichek = {48, 63, 64, 74, 79, 92, 94, 95}
    assert all(XIDS[number][0] is not Group.APPLICATION for number in azure | sichek)
    assert {number for number, (group, _) in XIDS.items() if group is Group.APPLICATION} == {13, 31, 43, 45}


def test_the_log_is_read_from_where_it_may_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    context = Context(root=str(tmp_path))
    write(tmp_path, {"proc/uptime": "7300.00 100.00\n"})
    assert [each.status for each in kernel_log.check(context)] == ["skipped"]
    write(tmp_path, {"dmesg": f"#!/bin/sh\necho '[ 7206.000000] {USER}'\n"})
    (tmp_path / "dmesg").chmod(0o755)
    assert kernel_log.check(context)[0].line.startswith("XID 31")
    write(tmp_path, {"dev/kmsg": FRAMES[0].format(LOST) + "\n"})
    assert kernel_log.check(context)[0].line.startswith("XID 79")


def test_reading_this_machines_log_ends() -> None:
    if not os.access("/dev/kmsg", os.R_OK):
        pytest.skip("this user may not read it")
    assert kernel_log.read(Context())
