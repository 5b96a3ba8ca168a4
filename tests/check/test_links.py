"""PCIe links, network cards and RDMA ports, from folders that stand for sysfs.

Written by hand from Linux's documentation of these files (Documentation/ABI: sysfs-bus-pci, sysfs-class-net,
sysfs-class-infiniband): no such hardware was at hand.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from resilient.check import fabric, nics, pcie
from resilient.check.context import Context
from resilient.check.limits import Limits
from resilient.check.result import Result, Status
from resilient.clock import SYSTEM_CLOCK
from tests.check.roots import write

LIMITS = Limits()
GPU, NIC, NVME, BRIDGE = "0x030200", "0x020000", "0x010802", "0x060400"


class Moving:
    """A clock that passes time by being asked to sleep, and does something meanwhile."""

    def __init__(self, meanwhile: dict[str, str], root: Path) -> None:
        self._now_s, self._meanwhile, self._root = 0.0, meanwhile, root

    def now(self) -> datetime:
        return SYSTEM_CLOCK.now()

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, duration_s: float) -> None:
        self._now_s += duration_s
        write(self._root, self._meanwhile)


# PCIe -----------------------------------------------------------------------------------------------------------------


def device(
    root: Path,
    address: str,
    kind: str,
    width: int,
    max_width: int,
    speed: str,
    max_speed: str,
    *,
    port: str | None = None,
) -> None:
    """Make a device, below a port if its folder is given."""
    folder = f"{port or 'sys/devices/pci0000:00'}/{address}"
    write(
        root,
        {
            f"{folder}/class": f"{kind}\n",
            f"{folder}/current_link_width": f"{width}\n",
            f"{folder}/max_link_width": f"{max_width}\n",
            f"{folder}/current_link_speed": f"{speed}\n",
            f"{folder}/max_link_speed": f"{max_speed}\n",
        },
    )
    links = root / "sys/bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    (links / address).symlink_to(root / folder)


def judged(root: Path, *, loaded: bool = False) -> list[Result]:
    return pcie.judge(pcie.read_links(Context(root=str(root))), loaded=loaded)


def test_links_at_their_best_pass(tmp_path: Path) -> None:
    device(tmp_path, "0000:3b:00.0", GPU, 16, 16, "32.0 GT/s PCIe", "32.0 GT/s PCIe")
    device(tmp_path, "0000:01:00.0", NVME, 4, 4, "16.0 GT/s PCIe", "16.0 GT/s PCIe")
    device(tmp_path, "0000:00:01.0", BRIDGE, 0, 16, "2.5 GT/s PCIe", "16.0 GT/s PCIe")  # an empty slot
    (result,) = judged(tmp_path)
    assert (result.status, result.line) == (
        Status.OK,
        "2 devices (GPU, NVMe disk) have all that they and their ports can do",
    )


def test_x8_of_x16_fails_with_one_line(tmp_path: Path) -> None:
    device(tmp_path, "0000:3b:00.0", GPU, 8, 16, "32.0 GT/s PCIe", "32.0 GT/s PCIe")
    device(tmp_path, "0000:5e:00.0", GPU, 16, 16, "32.0 GT/s PCIe", "32.0 GT/s PCIe")
    (result,) = judged(tmp_path)
    assert (result.status, result.line) == (Status.FAILED, "the GPU at 0000:3b:00.0 runs at x8 of x16")
    assert (result.figure, result.limit, result.unit) == (8, 16, "lanes")


def test_a_low_speed_fails_and_of_a_gpu_only_at_work(tmp_path: Path) -> None:
    device(tmp_path, "0000:86:00.0", NIC, 16, 16, "8.0 GT/s PCIe", "16.0 GT/s PCIe")
    device(tmp_path, "0000:3b:00.0", GPU, 16, 16, "2.5 GT/s PCIe", "32.0 GT/s PCIe")
    (result,) = judged(tmp_path)
    assert (result.status, result.line) == (Status.FAILED, "the network card at 0000:86:00.0 runs at 8 of 16 GT/s")
    assert [each.subject for each in judged(tmp_path, loaded=True)] == ["0000:3b:00.0", "0000:86:00.0"]


def test_a_device_cannot_do_more_than_its_port(tmp_path: Path) -> None:
    device(tmp_path, "0000:00:03.0", BRIDGE, 8, 8, "16.0 GT/s PCIe", "16.0 GT/s PCIe")
    port = "sys/devices/pci0000:00/0000:00:03.0"
    device(tmp_path, "0000:3b:00.0", GPU, 8, 16, "16.0 GT/s PCIe", "32.0 GT/s PCIe", port=port)
    assert [each.status for each in judged(tmp_path, loaded=True)] == ["ok"]


def test_devices_that_show_no_link_are_skipped(tmp_path: Path) -> None:
    device(tmp_path, "0000:00:04.0", NIC, 0, 0, "Unknown", "Unknown")
    assert [each.status for each in judged(tmp_path)] == ["skipped"]


# Network cards --------------------------------------------------------------------------------------------------------


def nic(
    root: Path, name: str, *, up: bool = True, carrier: bool = True, speed: int = 100_000, physical: bool = True
) -> None:
    folder = f"sys/class/net/{name}"
    write(
        root,
        {
            f"{folder}/flags": "0x1003\n" if up else "0x1002\n",
            f"{folder}/operstate": "up\n" if carrier else "down\n",
            f"{folder}/carrier": "1\n" if carrier else "0\n",
            f"{folder}/speed": f"{speed}\n",
            f"{folder}/carrier_changes": "5\n",
            f"{folder}/statistics/rx_errors": "7\n",
            f"{folder}/statistics/tx_errors": "0\n",
            f"{folder}/statistics/rx_crc_errors": "7\n",
            f"{folder}/statistics/rx_frame_errors": "0\n",
        },
    )
    if physical:
        write(root, {f"{folder}/device/vendor": "0x15b3\n", f"{folder}/device/device": "0x1021\n"})


def watched(root: Path, meanwhile: dict[str, str] | None = None) -> list[Result]:
    return nics.watched(Context(root=str(root)), Moving(meanwhile or {}, root))


def test_cards_with_a_link_and_old_errors_pass(tmp_path: Path) -> None:
    nic(tmp_path, "eth0")
    nic(tmp_path, "eth1", up=False, carrier=False, speed=-1)  # nobody wants it
    nic(tmp_path, "docker0", carrier=False, physical=False)
    assert [(each.status, each.line) for each in watched(tmp_path)] == [
        ("ok", "up: eth0 100 Gbit/s"),
        ("ok", "none grew in 1 s"),
    ]


def test_a_link_that_is_down_fails_with_one_line(tmp_path: Path) -> None:
    nic(tmp_path, "eth0")
    nic(tmp_path, "eth1", carrier=False, speed=-1)
    bad, _ = watched(tmp_path)
    assert (bad.status, bad.line) == (Status.FAILED, "eth1 has no link")


def test_a_card_slower_than_its_like_is_slow(tmp_path: Path) -> None:
    nic(tmp_path, "eth0")
    nic(tmp_path, "eth1", speed=25_000)
    bad, _ = watched(tmp_path)
    assert (bad.status, bad.line) == (
        Status.SLOW,
        "eth1 runs at 25 Gbit/s, a card of the same model here at 100",
    )


@pytest.mark.parametrize(
    ("counter", "count", "line"),
    [
        ("statistics/rx_crc_errors", "57", "rx_crc_errors of eth0 grew by 50 in 1 s"),
        ("carrier_changes", "7", "carrier_changes of eth0 grew by 2 in 1 s"),
    ],
)
def test_errors_that_grow_fail(counter: str, count: str, line: str, tmp_path: Path) -> None:
    nic(tmp_path, "eth0")
    _, bad = watched(tmp_path, {f"sys/class/net/eth0/{counter}": f"{count}\n"})
    assert (bad.status, bad.line) == (Status.FAILED, line)


def test_without_a_card_nothing_is_said(tmp_path: Path) -> None:
    nic(tmp_path, "veth1", physical=False)
    assert [each.status for each in watched(tmp_path)] == ["skipped", "skipped"]


# InfiniBand and RoCE --------------------------------------------------------------------------------------------------


def port(
    root: Path, name: str, *, state: str = "4: ACTIVE", phys: str = "5: LinkUp", rate: str = "400 Gb/sec (4X NDR)"
) -> None:
    folder = f"sys/class/infiniband/{name}/ports/1"
    write(
        root,
        {
            f"{folder}/state": f"{state}\n",
            f"{folder}/phys_state": f"{phys}\n",
            f"{folder}/rate": f"{rate}\n",
            f"{folder}/link_layer": "InfiniBand\n",
            f"{folder}/counters/symbol_error": "12\n",
            f"{folder}/counters/link_downed": "1\n",
            f"{folder}/hw_counters/out_of_sequence": "3\n",
        },
    )


def fabric_watched(root: Path, meanwhile: dict[str, str] | None = None) -> list[Result]:
    return fabric.watched(Context(root=str(root)), Moving(meanwhile or {}, root))


def test_active_ports_with_old_errors_pass(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1", state="1: DOWN", phys="3: Disabled", rate="10 Gb/sec (4X SDR)")
    assert [(each.status, each.line) for each in fabric_watched(tmp_path)] == [
        ("ok", "1 ports active: mlx5_0/1 400 Gbit/s"),
        ("ok", "none grew in 1 s"),
    ]


@pytest.mark.parametrize(
    ("state", "phys", "line"),
    [
        ("1: DOWN", "2: Polling", "mlx5_1/1 is down: down, polling"),
        ("2: INIT", "5: LinkUp", "mlx5_1/1 is down: init, linkup"),  # no subnet manager
    ],
)
def test_a_port_that_is_down_fails_with_one_line(state: str, phys: str, line: str, tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1", state=state, phys=phys)
    bad, _ = fabric_watched(tmp_path)
    assert (bad.status, bad.line) == (Status.FAILED, line)


def test_a_port_with_fewer_lanes_is_slow(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1", rate="100 Gb/sec (1X NDR)")
    bad, _ = fabric_watched(tmp_path)
    assert (bad.status, bad.line) == (
        Status.SLOW,
        "mlx5_1/1 runs at 100 Gbit/s, another port of this node at 400",
    )


@pytest.mark.parametrize(
    ("counter", "count", "line"),
    [
        ("counters/symbol_error", "112", "symbol_error of mlx5_0/1 grew by 100 in 1 s"),
        ("counters/link_downed", "2", "link_downed of mlx5_0/1 grew by 1 in 1 s"),
        ("hw_counters/out_of_sequence", "90", "out_of_sequence of mlx5_0/1 grew by 87 in 1 s"),
    ],
)
def test_rdma_errors_that_grow_fail(counter: str, count: str, line: str, tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0")
    _, bad = fabric_watched(tmp_path, {f"sys/class/infiniband/mlx5_0/ports/1/{counter}": f"{count}\n"})
    assert (bad.status, bad.line) == (Status.FAILED, line)


def test_without_a_port_nothing_is_said(tmp_path: Path) -> None:
    assert [each.status for each in fabric_watched(tmp_path)] == ["skipped"]
