"""Stores, names, ports, clocks, accelerators, and a node's own earlier record."""

from __future__ import annotations

import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
import torch

from resilient.check import accelerator, names, place, reference, timekeeping
from resilient.check.accelerator import Device
from resilient.check.context import Context
from resilient.check.limits import MIB, Limits
from resilient.check.result import Result, Status, failed
from resilient.check.timekeeping import Discipline
from resilient.errors import StoreError, UsageError
from resilient.store.memory import MemoryStore
from resilient.testing.faulty_store import Fault, FaultyStore, Mode
from tests.check.roots import write

LIMITS = Limits()


# Stores ---------------------------------------------------------------------------------------------------------------


def test_a_directory_is_reached_measured_and_left_as_it_was(tmp_path: Path) -> None:
    found = {each.name: each for each in place.check(Context(places=(str(tmp_path),)))}
    assert {name: each.status for name, each in found.items()} == {
        place.NAME: "ok",
        place.BANDWIDTH: "ok",
        place.CLOCK: "ok",
    }
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.s3
def test_an_s3_server_is_reached_and_shows_its_clock(s3_url: str) -> None:
    found = {each.name: each for each in place.check(Context(places=(s3_url,)))}
    assert found[place.NAME].status is Status.OK
    assert found[place.CLOCK].status is Status.OK
    assert found[place.BANDWIDTH].unit == "MiB/s"


def test_a_place_that_cannot_be_used_fails_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (result,) = place.check(Context(places=(str(tmp_path / "file"),)))
    assert result.status is Status.FAILED
    assert result.remedy
    assert place.check(Context())[0].status is Status.SKIPPED


def test_a_store_that_gives_back_something_else_fails() -> None:
    class Flipping(MemoryStore):
        def read_into(self, key: str, start: int, into: memoryview) -> None:
            super().read_into(key, start, into)
            into[len(into) // 2] ^= 1

    store = Flipping()
    (result,) = place.measured(store, 2 * MIB, LIMITS)
    assert (result.status, result.line) == (Status.FAILED, "what was read back is not what was stored")
    assert list(store.list("")) == []


def test_a_store_that_fails_in_the_middle_is_left_clean() -> None:
    store = FaultyStore(MemoryStore(), Fault(verbs=frozenset({"read_into"}), mode=Mode.FAIL))
    with pytest.raises(StoreError):
        place.measured(store, MIB, LIMITS)
    assert list(store.inner.list("")) == []


def test_a_slow_store_is_slow() -> None:
    assert place.judge_bandwidth(1.5 * MIB, 90.0 * MIB, LIMITS).line == "stores only 1.5 MiB/s"
    assert place.judge_bandwidth(150.0 * MIB, 90.0 * MIB, LIMITS).status is Status.OK


@pytest.mark.parametrize(
    ("offset_s", "status"), [(1.2, "ok"), (-61.0, "failed"), (3600.0, "failed"), (None, "skipped")]
)
def test_the_clock_of_a_store(offset_s: float | None, status: str) -> None:
    result = place.judge_clock(offset_s, LIMITS)
    assert result.status == status
    if offset_s == -61.0:
        assert result.line == "this node's clock is 61 s ahead of the store's"


def test_the_clock_of_a_store_is_what_it_says_of_an_object() -> None:
    class Timed(MemoryStore):
        def written_at(self, key: str) -> datetime:
            return datetime.now(UTC) + timedelta(seconds=90)

    clock = place.measured(Timed(), MIB, LIMITS)[1]
    assert (clock.name, clock.status) == (place.CLOCK, Status.FAILED)
    assert clock.line.startswith("this node's clock is 90 s behind")


# Names and ports ------------------------------------------------------------------------------------------------------


def test_a_name_without_an_address_fails() -> None:
    address, duration_s = names.resolve("nobody.invalid")
    result = names.judge_resolved("nobody.invalid", address, duration_s, LIMITS)
    assert (result.status, result.line) == (Status.FAILED, "nobody.invalid has no address")
    assert names.resolve("localhost")[0] in {"127.0.0.1", "::1"}
    assert names.judge_resolved("a", "10.0.0.7", 5.1, LIMITS).line == "took 5.1 s to resolve"
    assert names.judge_resolved("a", "10.0.0.7", 0.1, LIMITS).status is Status.OK
    assert "--local-addr" in names.judge_resolved("a", "127.0.1.1", 0.1, LIMITS).line


def test_the_hosts_of_places_are_looked_up() -> None:
    assert names.host_of("https://minio.example:9000/bucket/run") == "minio.example"
    assert names.host_of("s3://bucket/run") is None
    assert names.host_of("/data/run") is None


def test_a_port_that_cannot_be_connected_to_fails() -> None:
    assert names.connect_to_itself("127.0.0.1") is None
    # RFC 5737: an address for documentation is nobody's, as when /etc/hosts names another machine's for this one.
    why = names.connect_to_itself("192.0.2.1")
    assert why is not None
    result = names.judge_connection("192.0.2.1", why)
    assert result.status is Status.FAILED
    assert result.line.startswith("no connection to a port of its own address 192.0.2.1: ")
    assert "/etc/hosts" in result.remedy


def test_too_few_ports_fail(tmp_path: Path) -> None:
    write(tmp_path, {"proc/sys/net/ipv4/ip_local_port_range": "60000\t60999\n"})
    result = names.ports(socket.gethostname(), Context(root=str(tmp_path)))
    assert (result.status, result.figure) == (Status.FAILED, 1000)


# Clocks ---------------------------------------------------------------------------------------------------------------


def test_the_kernel_can_be_asked_for_its_clock() -> None:
    found = timekeeping.read()
    assert found is None or abs(found.offset_s) < 1


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (Discipline(synchronized=True, offset_s=0.000_02, estimate_s=0.000_3), "ok"),
        (Discipline(synchronized=True, offset_s=-0.005_1, estimate_s=0.000_3), "failed"),
        (Discipline(synchronized=True, offset_s=0.0, estimate_s=0.02), "failed"),
        (Discipline(synchronized=False, offset_s=0.0, estimate_s=16.0), "skipped"),
        (None, "skipped"),
    ],
)
def test_a_clock_5_ms_off_fails(found: Discipline | None, status: str) -> None:
    result = timekeeping.judge(found, LIMITS)
    assert result.status == status
    if found is not None and found.offset_s < 0:
        assert result.line == "this clock is 5.1 ms off"


# Accelerators ---------------------------------------------------------------------------------------------------------


def device(name: str = "cuda:0", *, wrong: int = 0, unequal: int = 0, tflops: float = 600.0) -> Device:
    return Device(name=name, kind="H100", done=50, wrong=wrong, unequal=unequal, tflops=tflops)


def test_the_products_are_exact_and_repeat_on_a_right_device() -> None:
    """The processor stands for a device: the same code, the same reference."""
    found = accelerator.measure(torch.device("cpu"), 0.1, size=64)
    assert (found.wrong, found.unequal) == (0, 0)
    assert found.done >= 2


def test_other_bits_for_the_same_product_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    equal, asked = torch.equal, 0

    def flipped(a: torch.Tensor, b: torch.Tensor) -> bool:
        nonlocal asked
        asked += 1
        if asked == 2:
            a = a.clone()
            a.view(torch.int16)[7, 7] ^= 1
        return equal(a, b)

    monkeypatch.setattr(torch, "equal", flipped)
    found = accelerator.measure(torch.device("cpu"), 0.1, size=64)
    assert (found.wrong, found.unequal) == (0, 1)


def test_the_device_that_is_wrong_or_slow_is_named() -> None:
    bad = accelerator.judge([device(), device("cuda:1", unequal=2), device("cuda:2", wrong=1)], LIMITS)
    assert [each.line for each in bad] == [
        "cuda:1 computed 2 of 50 times other bits for the same product",
        "cuda:2 computed a wrong product of whole numbers",
    ]
    (slow,) = accelerator.judge([device(f"cuda:{n}", tflops=400.0 if n == 3 else 600.0) for n in range(8)], LIMITS)
    assert (slow.status, slow.line) == (Status.SLOW, "cuda:3 multiplies at 0.67 of the speed of its like")
    (well,) = accelerator.judge([device(), device("cuda:1", tflops=580.0)], LIMITS)
    assert (well.status, well.figure, well.unit) == (Status.OK, 580.0, "TFLOP/s")


# An earlier record ----------------------------------------------------------------------------------------------------


def rate(figure: float) -> Result:
    return Result(name="memory bandwidth", status=Status.OK, line="copies", figure=figure, unit="GiB/s")


def test_a_node_that_has_become_slower_than_its_record_is_slow(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_bytes(msgspec.json.encode({"status": "ok", "results": [rate(12.0)]}))
    recorded = reference.read(tmp_path / "record.json")
    (slow,) = reference.compared([rate(6.0)], recorded, LIMITS)
    assert (slow.status, slow.line) == (Status.SLOW, "6 GiB/s, 0.50 of what this node once had (12)")
    assert reference.compared([rate(10.0)], recorded, LIMITS) == [rate(10.0)]
    bad = failed("memory bandwidth", "gone", "replace it")
    assert reference.compared([bad], recorded, LIMITS) == [bad]


@pytest.mark.parametrize("content", [None, "no JSON", '{"status": "ok"}'])
def test_what_is_no_record_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "record.json").write_text(content)
    with pytest.raises(UsageError, match="is no record of a check"):
        reference.read(tmp_path / "record.json")
