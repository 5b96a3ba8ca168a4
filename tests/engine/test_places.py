"""Saving and loading by hand is the same wherever the place is and whatever it is called."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
import torch

import resilient
from resilient.errors import ErrorKind, StoreError
from resilient.testing.processes import full_disk

UNUSUAL = "with space/a+b=c,d/100%25/größe/日本語"


def state(value: float) -> dict[str, dict[str, Any]]:
    return {"s": {"w": torch.full((1_000,), value), "epoch": int(value)}}


def check(place: Any, **options: Any) -> None:
    """Save two steps at a place, then ask for the newest, for those that there are, and for the older one."""
    for step in (1, 2):
        resilient.save(place, step, state(step), **options).wait(60)
    into = state(0)
    for asked, found in (("latest", 2), (1, 1)):
        assert resilient.load(place, into, asked, **options).step == found  # type: ignore[arg-type]  # as written above
        assert torch.equal(into["s"]["w"], state(found)["s"]["w"])
        assert into["s"]["epoch"] == found
    assert [each.step for each in resilient.checkpoints(place, **options)] == [2, 1]


@pytest.mark.field_report("BR-025")
@pytest.mark.parametrize("form", ["relative", "./relative", "{}/absolute", "file://{}/url", "memory://test-places/run"])
def test_paths_and_urls_are_the_same(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check(form.format(tmp_path))


@pytest.mark.s3
@pytest.mark.field_report("BR-021", "BR-025")
@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_a_bucket_is_the_same_under_any_prefix(client: str, s3_url: str) -> None:
    for place in (s3_url, f"{s3_url}/{UNUSUAL}"):
        check(place, storage_options={"client": client})


@pytest.mark.field_report("BR-021")
def test_a_directory_is_the_same_under_any_name(tmp_path: Path) -> None:
    check(tmp_path / UNUSUAL)


@pytest.mark.field_report("BR-140")
def test_a_disk_with_room_for_one_and_a_half_checkpoints_keeps_the_first_one_whole() -> None:
    numel = 1 << 20
    with full_disk(6 << 20) as disk:
        if disk.how != "mount":
            pytest.skip("this process may not mount")
        place = disk.path / secrets.token_hex(4)
        items = {"s": {"w": torch.randint(2**31, (numel,), dtype=torch.int32)}}
        first = items["s"]["w"].clone()
        resilient.save(place, 1, items).wait(60)
        items["s"]["w"].add_(1)
        handle = resilient.save(place, 2, items)
        items["s"]["w"].add_(1)  # training goes on
        with pytest.raises(StoreError, match=r"4,194,304 bytes needed, [12],[\d,]+ free") as caught:
            handle.wait(60)
        assert caught.value.kind is ErrorKind.NO_SPACE
        assert [path for path in place.rglob("*") if path.stat().st_size > numel] == [
            path for path in place.rglob("*") if "000000000001-" in path.name
        ]
        assert [each.step for each in resilient.checkpoints(place)] == [1]
        assert resilient.load(place, items).step == 1
        assert torch.equal(items["s"]["w"], first)
