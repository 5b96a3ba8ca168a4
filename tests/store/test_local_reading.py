"""Cold data comes past the page cache and leaves it as it was; whatever the file system offers, the bytes are right."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient.store import local_reading
from resilient.store.local_reading import read

NBYTES = (5 << 20) + 1234


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(7).randbytes(NBYTES)


@pytest.fixture
def path(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "file"
    path.write_bytes(content)
    return path


@pytest.fixture
def file(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY)
    yield file
    os.close(file)


def make_cold(file: int) -> None:
    os.fsync(file)
    for attempt in range(1, 6):  # pages that the kernel is still busy with stay
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        if not is_cached(file, NBYTES - attempt * 16 * mmap.PAGESIZE):
            return
    pytest.skip("this file system keeps its pages whatever it is told")


def is_cached(file: int, at: int) -> bool:
    """Ask for a byte with a read that must not wait, which makes the kernel fetch its page."""
    try:
        return os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False


@pytest.mark.parametrize("cold", [True, False])
def test_any_range_into_memory_of_any_alignment_is_read_right(content: bytes, file: int, *, cold: bool) -> None:
    draw = random.Random(3)
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, NBYTES + 4 * page)
    for _ in range(20):
        if cold:
            make_cold(file)
        start = draw.choice([0, page, 3 * page, draw.randrange(NBYTES)])
        nbytes = draw.choice([NBYTES, 2 << 20, (1 << 20) + 5, draw.randrange(NBYTES)])
        shift = draw.choice([0, page, draw.randrange(page)])
        into = memoryview(memory)[shift : shift + nbytes]
        count = read(file, start, into)
        assert count == min(nbytes, NBYTES - start)
        assert bytes(into[:count]) == content[start : start + count]
        assert not fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT


def test_what_was_not_in_the_page_cache_is_not_there_after_it_was_read(file: int) -> None:
    make_cold(file)
    memory = memoryview(mmap.mmap(-1, 4 << 20))
    for _ in range(2):
        assert read(file, 0, memory) == memory.nbytes
    # From the end: what one question makes the kernel read ahead is then not asked about.
    assert not any(is_cached(file, at) for at in range((4 << 20) - 1, 0, -64 * mmap.PAGESIZE))


def test_what_is_in_the_page_cache_is_not_asked_of_the_disk(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memoryview(mmap.mmap(-1, 4 << 20))
    os.preadv(file, [memory], 0)
    monkeypatch.setattr(local_reading, "_read_past", lambda *_: pytest.fail("a cached range was read from the disk"))
    assert read(file, 0, memory) == memory.nbytes


@pytest.mark.parametrize("refusing", ["the flag", "the read"])
def test_a_file_system_without_direct_reads_is_read_through_the_cache(
    content: bytes, file: int, monkeypatch: pytest.MonkeyPatch, refusing: str
) -> None:
    refused: list[int] = []

    def refuse(*_: object) -> int:
        refused.append(1)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    real_fcntl, real_preadv = fcntl.fcntl, os.preadv

    def without_flag(opened: int, command: int, flags: int = 0) -> int:
        return refuse() if flags & os.O_DIRECT else int(real_fcntl(opened, command, flags))

    def without_direct_reads(opened: int, buffers: list[memoryview], at: int, flags: int = 0) -> int:
        is_direct = real_fcntl(opened, fcntl.F_GETFL) & os.O_DIRECT
        return refuse() if is_direct else real_preadv(opened, buffers, at, flags)

    monkeypatch.setattr(local_reading, "_is_cached", lambda *_: False)
    if refusing == "the flag":
        monkeypatch.setattr("resilient.store.local_reading.fcntl.fcntl", without_flag)
    else:
        monkeypatch.setattr("resilient.store.local_reading.os.preadv", without_direct_reads)
    memory = memoryview(mmap.mmap(-1, 4 << 20))
    assert read(file, 0, memory) == memory.nbytes
    assert refused
    assert bytes(memory) == content[: memory.nbytes]


TRUNCATED = """
import os, sys
from resilient.store import local
from resilient.store.local import LocalStore

def refuse(event, arguments):
    if event == "mmap.__new__" and arguments[0] != -1:
        raise RuntimeError("a file is mapped")

store = LocalStore(sys.argv[1])
store.put("shard", [bytes(8 << 20)])
sys.addaudithook(refuse)
preadv = os.preadv

def truncate(*arguments):  # when the file is open already, as another node does it while this one reads
    os.truncate(store.root / "shard", 1 << 20)
    return preadv(*arguments)

os.preadv = truncate
try:
    store.read_into("shard", 0, memoryview(bytearray(8 << 20)))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.field_report("BR-231")
def test_a_file_that_gets_shorter_while_it_is_read_is_an_error_with_its_cause(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRUNCATED, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"SIGBUS is -7: {done.stderr}"
    assert done.stdout.startswith("CorruptError object 'shard' in ")
    assert "ends at byte 1048576; bytes 0 to 8388608 are wanted" in done.stdout
