"""Disks: what was written is read back, space, and a flush that lies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resilient.check import disk
from resilient.check.context import Context
from resilient.check.disk import Medium, Written, flush_latency_s, judge_flush, judge_space, judge_written, medium_of
from resilient.check.limits import GIB, MIB, Limits
from resilient.check.result import Status
from tests.check.roots import write

LIMITS = Limits()


def test_a_real_disk_is_written_read_and_left_as_it_was(tmp_path: Path) -> None:
    found = {each.name: each for each in disk.check(Context(places=(str(tmp_path / "new"),)))}
    assert set(found) == {disk.SPACE, disk.NAME, disk.FLUSH}
    assert found[disk.NAME].status in {Status.OK, Status.SLOW}, found
    assert list((tmp_path / "new").iterdir()) == []


def test_without_a_place_the_disk_of_temporary_files_is_looked_at() -> None:
    assert len(Context().folders) == 1
    assert Context(places=("s3://bucket/run",)).folders == ()
    assert Context(places=("s3://bucket/run", "/data")).folders == (Path("/data"),)


def test_what_cannot_be_used_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (result,) = disk.check(Context(places=(str(tmp_path / "file"),)))
    assert result.status is Status.FAILED
    assert "cannot be used" in result.line


def test_a_flipped_bit_on_the_disk_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk.measure(tmp_path, 16 * MIB).same
    (tmp_path / "written").unlink()
    read = os.read
    monkeypatch.setattr(
        os, "read", lambda file, nbytes: (part := read(file, nbytes)) and bytes([part[0] ^ 4]) + part[1:]
    )
    written = disk.measure(tmp_path, 16 * MIB)
    assert judge_written(written, LIMITS).line == "what was read back is not what was written"


def test_a_flush_that_lies_fails(tmp_path: Path) -> None:
    """As with eatmydata, or a virtual disk with cache=unsafe: the call returns and nothing has moved."""
    latency_s = flush_latency_s(tmp_path, 50, flush=lambda _file: None)
    result = judge_flush(latency_s, "flash", LIMITS)
    assert result.status is Status.FAILED
    assert "loses what was said to be saved" in result.line
    assert "eatmydata" in result.remedy


@pytest.mark.parametrize(
    ("latency_s", "medium", "status"),
    [
        (8e-3, "rotating", "ok"),
        (120e-6, "rotating", "failed"),  # no platter turns so fast
        (900e-6, "flash", "ok"),
        (25e-6, "flash", "ok"),  # with capacitors that keep its cache
        (2e-6, "flash", "failed"),
        (1.5e-3, "virtual", "ok"),
        (2e-6, "virtual", "failed"),
        (1e-6, "memory", "ok"),  # it does not claim to be durable
        (300e-6, "network", "ok"),
    ],
)
def test_no_flush_is_faster_than_its_medium(latency_s: float, medium: Medium, status: str) -> None:
    assert judge_flush(latency_s, medium, LIMITS).status == status


def test_the_medium_is_found_from_what_linux_says(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    context = Context(root=str(tmp_path))
    mounts = f"/dev/x / ext4 rw 0 0\n/dev/x {tmp_path} ext4 rw 0 0\n"
    write(
        tmp_path,
        {"proc/self/mounts": mounts, "sys/block/sda/queue/rotational": "1\n", "sys/block/sda/sda1/partition": "1"},
    )
    links = tmp_path / "sys/dev/block"
    links.mkdir(parents=True)
    (links / number).symlink_to(tmp_path / "sys/block/sda/sda1")  # the queue is the whole disk's
    assert medium_of(folder, context) == "rotating"
    write(tmp_path, {"sys/block/sda/queue/rotational": "0\n"})
    assert medium_of(folder, context) == "flash"
    write(tmp_path, {"sys/block/vda/queue/rotational": "1\n"})
    (links / number).unlink()
    (links / number).symlink_to(tmp_path / "sys/block/vda")
    assert medium_of(folder, context) == "virtual", "a virtual disk does not know whether it turns"
    write(tmp_path, {"proc/self/mounts": mounts + f"tmpfs {folder} tmpfs rw 0 0\n"})
    assert medium_of(folder, context) == "memory"
    write(tmp_path, {"proc/self/mounts": mounts + f"host:/x {folder} nfs4 rw 0 0\n"})
    assert medium_of(folder, context) == "network"


def test_space_and_speed_have_limits() -> None:
    assert judge_space(1 * GIB, 100 * GIB, LIMITS).status is Status.FAILED
    assert judge_space(10 * GIB, 100 * GIB, LIMITS).status is Status.OK
    slow = judge_written(Written(write_rate=3.0 * MIB, read_rate=900.0 * MIB, same=True), LIMITS)
    assert (slow.status, slow.line) == (Status.SLOW, "writes only 3.0 MiB/s")
    assert judge_written(Written(write_rate=300.0 * MIB, read_rate=900.0 * MIB, same=True), LIMITS).status is Status.OK
