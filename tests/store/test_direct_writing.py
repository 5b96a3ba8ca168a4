"""Large objects past the page cache: every byte where it belongs, on every file system."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
from pathlib import Path

import pytest

from resilient.errors import ErrorKind, StoreError
from resilient.store import direct_writing
from resilient.store.direct_writing import LEAST_NBYTES
from resilient.store.local import LocalStore
from tests.store.conformance import names_in

PAGE = mmap.PAGESIZE
MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the length of each write to a file that is open for direct writing."""
    lengths: list[int] = []
    pwrite = os.pwrite

    def record(file: int, data: memoryview, start: int) -> int:
        assert start % PAGE == 0 == len(data) % PAGE
        lengths.append(len(data))
        return pwrite(file, data, start)

    monkeypatch.setattr(os, "pwrite", record)
    return lengths


def pages(nbytes: int, seed: int = 1) -> memoryview:
    """Return memory that starts with a page."""
    memory = mmap.mmap(-1, -(-nbytes // PAGE) * PAGE)
    memory.write(random.Random(seed).randbytes(nbytes))
    return memoryview(memory)[:nbytes]


@pytest.mark.parametrize("nbytes", [LEAST_NBYTES, LEAST_NBYTES + 1, 3 * MIB + PAGE - 1, 3 * MIB + PAGE])
def test_memory_that_starts_with_a_page_is_written_from_where_it_lies(
    store: LocalStore, direct: list[int], monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    monkeypatch.setattr(direct_writing, "_BLOCK_NBYTES", MIB)
    data = pages(nbytes)
    store.put("a/key", [data])
    assert store.get("a/key") == data
    assert store.size("a/key") == nbytes
    tail = [PAGE] if nbytes % PAGE else []
    whole = nbytes // PAGE * PAGE
    assert direct == [MIB] * (whole // MIB) + ([whole % MIB] if whole % MIB else []) + tail


@pytest.mark.parametrize("seed", range(4))
def test_buffers_of_any_length_anywhere_in_memory_are_gathered(
    store: LocalStore, direct: list[int], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(direct_writing, "_GATHERED_NBYTES", 16 * PAGE)
    draw = random.Random(seed)
    memory = pages(8 * MIB, seed)
    parts: list[memoryview] = []
    while sum(map(len, parts)) < 2 * LEAST_NBYTES:
        start = draw.choice([draw.randrange(4 * MIB), draw.randrange(1024) * PAGE])
        parts.append(memory[start : start + draw.choice([0, 1, PAGE, 5 * PAGE, draw.randrange(300_000)])])
    store.put("key", parts)
    assert store.get("key") == b"".join(parts), f"seed {seed}"
    assert direct


def test_small_objects_are_written_at_once(store: LocalStore, direct: list[int]) -> None:
    store.put("key", [pages(LEAST_NBYTES - 1)])
    assert direct == []
    assert store.size("key") == LEAST_NBYTES - 1


@pytest.mark.parametrize("refused_by", ["the file system", "the second block"])
def test_where_the_system_refuses_the_object_goes_through_the_cache(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, refused_by: str
) -> None:
    set_flags, pwrite = fcntl.fcntl, os.pwrite
    refusals: list[str] = []

    def refuse(who: str) -> None:
        refusals.append(who)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def flags(file: int, command: int, value: int = 0) -> int:
        if value & os.O_DIRECT and refused_by == "the file system":
            refuse("the file system")
        return set_flags(file, command, value)

    def write(file: int, data: memoryview, start: int) -> int:
        if start:
            refuse("the second block")
        return pwrite(file, data, start)

    monkeypatch.setattr(direct_writing, "_BLOCK_NBYTES", MIB)
    monkeypatch.setattr(fcntl, "fcntl", flags)
    monkeypatch.setattr(os, "pwrite", write)
    data = pages(2 * MIB + 5)
    store.put("key", [data])
    assert refusals == [refused_by]
    assert store.get("key") == data


@pytest.mark.field_report("BR-140", "BR-141")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("where", ["reserving", "writing"])
def test_a_full_disk_is_said_and_leaves_nothing(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, number: int, where: str
) -> None:
    class Full:
        @staticmethod
        def fallocate(*arguments: object) -> int:
            ctypes.set_errno(number)
            return -1

    def fail(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    if where == "reserving":
        monkeypatch.setattr(direct_writing, "_libc", Full)
    else:
        monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(StoreError, match=r"2,097,152 bytes needed, [\d,]+ free") as caught:
        store.put("folder/key", [pages(2 * MIB)])
    assert caught.value.kind is ErrorKind.NO_SPACE
    assert names_in(store.root / "folder") == []


def test_file_systems_without_direct_writing_take_the_same_objects() -> None:
    """A tmpfs takes the flag or not, by the version of the system; nobody shall notice."""
    root = Path("/dev/shm")
    if not root.is_dir():
        pytest.skip("no tmpfs here")
    folder = root / f"resilient-test-{os.getpid()}"
    try:
        store = LocalStore(folder)
        data = pages(LEAST_NBYTES + 7)
        store.put("key", [data[:5], data[5:]])
        assert store.get("key") == data
    finally:
        for each in sorted(folder.rglob("*"), reverse=True):
            each.unlink()
        folder.rmdir()
