"""Links and processors are read from what the kernel shows, of a recorded machine and of this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient.observe.machine.counters import Processors, open_links

UP, DOWN = "0x1003", "0x1002"


def card(root: Path, name: str, *, flags: str = UP, sent: int = 0, received: int = 0, speed: str | None = None) -> Path:
    folder = root / "sys/class/net" / name
    (folder / "statistics").mkdir(parents=True)
    (folder / "flags").write_text(flags + "\n")
    (folder / "statistics/tx_bytes").write_text(f"{sent}\n")
    (folder / "statistics/rx_bytes").write_text(f"{received}\n")
    if speed is not None:
        (folder / "speed").write_text(speed + "\n")
    return folder


def port(root: Path, name: str, *, words: int, rate: str) -> None:
    folder = root / "sys/class/infiniband" / name / "ports/1"
    (folder / "counters").mkdir(parents=True)
    (folder / "rate").write_text(rate + "\n")
    (folder / "counters/port_xmit_data").write_text(f"{words}\n")
    (folder / "counters/port_rcv_data").write_text(f"{2 * words}\n")


def test_cards_and_ports_of_rdma_count_and_the_loopback_is_apart(tmp_path: Path) -> None:
    for name, flags in (("eth1", UP), ("eth0", UP), ("eth2", DOWN)):
        (card(tmp_path, name, flags=flags, sent=7, received=8, speed="25000") / "device").mkdir()
    card(tmp_path, "docker0", sent=1)
    card(tmp_path, "lo", sent=5, received=5)
    port(tmp_path, "mlx5_0", words=10, rate="400 Gb/sec (4X NDR)")
    links = open_links(tmp_path)
    assert [link.name for link in links] == ["eth0", "eth1", "mlx5_0/1", "lo"]
    assert [link.traffic(link.read()) for link in links] == [(7, 8), (7, 8), (40, 80), (5, 5)], (
        "ports count in words of four bytes"
    )
    assert [link.capable for link in links] == [25e9 / 8, 25e9 / 8, 400e9 / 8, None]
    for link in links:
        link.close()


def test_in_a_container_the_ends_of_virtual_pairs_count(tmp_path: Path) -> None:
    card(tmp_path, "eth0", sent=3, speed="10000")
    card(tmp_path, "eth1", speed="-1")
    card(tmp_path, "lo")
    links = open_links(tmp_path)
    assert [(link.name, link.capable) for link in links] == [("eth0", 10e9 / 8), ("eth1", None), ("lo", None)]
    for link in links:
        link.close()


def test_counters_that_cannot_be_read_tell_nothing(tmp_path: Path) -> None:
    folder = card(tmp_path, "eth0", sent=3)
    (link,) = open_links(tmp_path)
    (folder / "statistics/tx_bytes").write_text("")
    assert link.traffic(link.read()) == (None, 0)
    link.close()


def test_processors_are_as_busy_as_ticks_say(tmp_path: Path) -> None:
    stat = tmp_path / "proc/stat"
    stat.parent.mkdir()
    stat.write_text("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 2 3\n")
    processors = Processors(tmp_path)
    assert processors.busy(processors.read()) is None, "there is nothing to compare with"
    assert processors.busy(processors.read()) is None, "no tick has passed"
    stat.write_text("cpu  150 0 110 720 120 0 0 0 30 0\ncpu0 1 2 3\n")  # guest time is in user time already
    assert processors.busy(processors.read()) == pytest.approx(60 / 100)
    processors.close()


def test_this_machine_can_be_read() -> None:
    links = open_links(Path("/"))
    for link in links:
        assert None not in link.traffic(link.read()), link.name
        link.close()
    Processors(Path("/")).close()
